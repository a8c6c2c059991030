"""The plans of a forward with open sizes, carried over to further sizes.

For sizes between those for which steps and problems were made, neither is made: the bytes of all storages are
expressions of the sizes, and one compiled source takes sizes as arguments. That needs steps of the same structure. What
decides it, apart from the guard of the capture, are equalities among sizes, such as a length that equals a width. So
the structure of a step is known without making it if a step was made for sizes among which the same ones are equal
(`SizePattern`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.capture.patches.fake_layouts import UNSURE, check_layouts
from rematplan.runtime.execute.autograd_function import CompiledPlan
from rematplan.runtime.execute.in_place import operands_to_overwrite
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs
from rematplan.runtime.graph.tracked_sizes import Sizes, without_values
from rematplan.runtime.problem.accumulation import Carrier, Resizing, StepPlan
from rematplan.runtime.symbols.expressions import OpenSize
from rematplan.runtime.symbols.symbolic_step import OpenStep, Size

PATTERNS = 64
"""The number of patterns of equal sizes whose structure is remembered: the latest."""
STRUCTURES = 4
"""The number of structures whose plans are kept: those used last."""
SizePattern: TypeAlias = tuple[int, ...]
Ints: TypeAlias = NDArray[np.int64]
Layout: TypeAlias = tuple[tuple[Size, ...], tuple[Size, ...]]
"""Shape and strides."""


@dataclass(eq=False)
class _Alike:
    """The plans of steps of one structure.

    ``step``: one of the steps, with its inverses. ``structure``: see `structure_of`. ``carrier``: gives the
    steps their inverses. ``resizing``: None if their
    problems have several structures. ``sources``: compiled plans for any sizes, by the key of the schedule.
    """

    step: CapturedStep
    structure: Hashable
    carrier: Carrier
    resizing: Resizing | None
    sources: OrderedDict[bytes, CompiledPlan] = field(default_factory=OrderedDict)

    def compiled(self, key: bytes, schedule: Schedule, most: int) -> CompiledPlan:
        """Return a schedule, compiled for any sizes. ``most``: the number of sources that are kept."""
        found = self.sources.pop(key, None) or CompiledPlan(self.step, schedule, for_any_sizes=True)
        self.sources[key] = found
        while len(self.sources) > most:
            self.sources.popitem(last=False)
        return found


@dataclass(eq=False)
class SizedPlans:
    """The plans of a step with open sizes. ``most``: the number of compiled sources that are kept for a structure."""

    step: OpenStep
    most: int
    _structures: list[_Alike] = field(default_factory=list)
    _of_pattern: OrderedDict[SizePattern, _Alike | None] = field(default_factory=OrderedDict)
    """The structure of each pattern; None if it has several."""

    @property
    def learned(self) -> bool:
        """Whether some problem is known."""
        return bool(self._structures)

    @property
    def sources(self) -> int:
        """The number of compiled sources."""
        return sum(len(one.sources) for one in self._structures)

    def learn(
        self,
        sizes: Sizes,
        batch: Sequence[torch.Tensor],
        step: CapturedStep,
        problem: TrainingGraph,
        carrier: Carrier,
    ) -> None:
        """Remember the problem that was made for the step of a batch.

        Args:
            sizes: the values of all expressions.
            batch: the tensors.
            step: the step, with its inverses.
            problem: its problem.
            carrier: carries its plans over to other sizes.
        """
        pattern, structure = self._pattern(sizes), structure_of(step)
        alike = next((one for one in self._structures if one.structure == structure), None)
        if alike is None:
            alike = _Alike(step, structure, carrier, carrier.resizing(step, problem, self._storages))
        if not (alike.resizing and alike.resizing.add(sizes, self._bytes(sizes, batch), problem)):
            alike.resizing = None
        others = [one for one in self._structures if one is not alike]
        self._structures = [*others[1 - STRUCTURES :], alike]
        known = self._of_pattern.pop(pattern, alike)
        self._of_pattern[pattern] = alike if known is alike else None
        while len(self._of_pattern) > PATTERNS:
            self._of_pattern.popitem(last=False)

    def carried(self, sizes: Sizes, batch: Sequence[torch.Tensor]) -> StepPlan | None:
        """Return the best known plan for a batch; its step has other sizes. None if none is known to fit.

        Args:
            sizes: the values of all expressions.
            batch: the tensors.

        Raises:
            NotSymbolic: the tensors cannot be used (`OpenStep.at`), or an op returns other strides at these sizes.
        """
        alike = self._of_pattern.get(self._pattern(sizes))
        if alike is None or alike.resizing is None:
            return None
        bytes_ = self._bytes(sizes, batch)
        self._check_layouts(sizes)
        return alike.resizing.plan(sizes, bytes_)

    def compiler(
        self, sizes: Sizes, made: Callable[[], CapturedStep]
    ) -> Callable[[StepPlan], CompiledPlan] | None:
        """Return a function that compiles plans for certain sizes. It compiles a schedule only once, which then serves
        all sizes. Return None if plans cannot be carried over between sizes: two batches with this pattern of equal
        sizes had steps, or planning problems, of different structures.

        Args:
            sizes: the values of all expressions, for which `carried` returned a plan, or `learn` got a problem.
            made: returns the step of these sizes.
        """
        alike = self._of_pattern.get(self._pattern(sizes))
        if alike is None or alike.resizing is None:
            return None
        key, source, most, opened = alike.resizing.key, alike.compiled, self.most, alike.carrier.opened

        def compile_(found: StepPlan) -> CompiledPlan:
            schedule = found.plan.schedule
            return source(key(schedule), schedule, most).at(sizes, lambda: opened(made()))

        return compile_

    def _check_layouts(self, sizes: Sizes) -> None:
        """See `check_layouts`: of the calls that it checks, only those with arguments that are not contiguous at these
        sizes are made for them."""
        doubtful = [
            call
            for call, operands in self._unsure
            if not all(_is_contiguous(shape, stride, sizes) for shape, stride in operands)
        ]
        if doubtful:
            check_layouts(self.step.excerpt(sizes, doubtful))

    @cached_property
    def _unsure(self) -> tuple[tuple[Call, tuple[Layout, ...]], ...]:
        """The calls whose results may have other strides than traced, with the shapes and strides of their
        arguments."""
        values = self.step.values
        return tuple(
            (
                call,
                tuple(
                    (values[r.value].shape, values[r.value].stride)
                    for r in refs((call.args, dict(call.kwargs)))
                ),
            )
            for call in self.step.calls
            if call.target in UNSURE
        )

    def _pattern(self, sizes: Sizes) -> SizePattern:
        """Return which sizes and strides, and which numbers of bytes, are equal to each other or to such numbers that
        occur in the step: for each of them that number, or the position of the first equal one after the largest."""
        found: list[int] = []
        for places, numbers in self._compared:
            first: dict[int, int] = {}
            found += [
                sizes[at] if sizes[at] in numbers else self._beyond + first.setdefault(sizes[at], at)
                for at in places
            ]
        return tuple(found)

    @cached_property
    def _compared(self) -> tuple[tuple[tuple[int, ...], frozenset[int]], ...]:
        """Twice, positions of expressions and the numbers that they are compared with: sizes and strides, and bytes."""
        layouts = [n for v in self.step.values.values() for n in (*v.shape, *v.stride, v.offset)]
        both = (0, 1, *layouts), self.step.memories
        return tuple(
            (
                tuple(dict.fromkeys(n.at for n in every if isinstance(n, OpenSize))),
                frozenset(n for n in every if not isinstance(n, OpenSize)),
            )
            for every in both
        )

    @cached_property
    def _beyond(self) -> int:
        return max(n for _, numbers in self._compared for n in (0, *numbers)) + 1

    @cached_property
    def _memory_of(self) -> dict[str, tuple[int, torch.device]]:
        """The memory and the device of each storage."""
        return {v.storage: (v.memory, v.device) for v in self.step.values.values()}

    @cached_property
    def _storages(self) -> tuple[str, ...]:
        return tuple(self._memory_of)

    @cached_property
    def _fixed_bytes(self) -> Ints:
        return np.array([0 if isinstance(m, OpenSize) else m for m in self.step.memories], dtype=np.int64)

    @cached_property
    def _open_bytes(self) -> tuple[Ints, Ints]:
        """The memories with open sizes, and the positions of their expressions."""
        rows = [(k, m.at) for k, m in enumerate(self.step.memories) if isinstance(m, OpenSize)]
        return np.array([k for k, _ in rows], dtype=np.int64), np.array(
            [at for _, at in rows], dtype=np.int64
        )

    @cached_property
    def _memories(self) -> Ints:
        """The memory of each storage."""
        return np.array([memory for memory, _ in self._memory_of.values()], dtype=np.int64)

    def _bytes(self, sizes: Sizes, batch: Sequence[torch.Tensor]) -> Ints:
        """Return the bytes of each storage, as the allocator of its device counts them."""
        found, (memories, at) = self._fixed_bytes.copy(), self._open_bytes
        found[memories] = np.array(sizes, dtype=np.int64)[at]
        for memory, tensor in self.step.bases(batch).items():
            found[memory] = tensor.untyped_storage().nbytes()
        of_storages: Ints = found[self._memories]
        devices = [device for _, device in self._memory_of.values()]
        if all(device.type == "cpu" for device in devices):
            return of_storages
        rounded = [allocated(int(n), device) for n, device in zip(of_storages, devices, strict=True)]
        return np.array(rounded, dtype=np.int64)


def _is_contiguous(shape: Sequence[Size], stride: Sequence[Size], sizes: Sizes) -> bool:
    """Return whether a tensor with open sizes is contiguous at certain sizes."""
    expected = 1
    for dim in reversed(range(len(shape))):
        size, step = (sizes[n.at] if isinstance(n, OpenSize) else n for n in (shape[dim], stride[dim]))
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def structure_of(step: CapturedStep) -> Hashable:
    """Return everything about a step on which its source depends, except the values of tracked sizes."""
    calls: list[Any] = [
        (
            *(c.name, c.results, c.single, c.is_view, c.seeded, c.backward, c.late, without_values(c.target)),
            *(without_values(c.args), without_values(dict(c.kwargs))),
        )
        for c in (*step.calls, *step.inverses)
    ]
    values = tuple((v.name, v.storage, v.call, v.fake.dtype, v.fake.device) for v in step.values.values())
    ends = step.inputs, step.outputs, step.attributes, step.left_out, step.arrived
    return tuple(calls), values, ends, operands_to_overwrite(step)
