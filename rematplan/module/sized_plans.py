"""Use plans that were found for some sizes of the batch at other sizes, without capturing or planning again.

Bytes follow from expressions of the sizes, and one compiled source takes their values. A plan serves only steps of its
own structure. Under the capture's guard that depends only on which sizes are equal (`SizePattern`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from rematplan.ir import TrainingGraph
from rematplan.planner.caches.latest import remember
from rematplan.planner.core.array_types import Ints
from rematplan.plans.planner import Planner
from rematplan.plans.refining import StepPlan
from rematplan.plans.resizing import Resizing
from rematplan.plans.step_structure import structure_of
from rematplan.runtime.capture.patches.fake_layouts import check_layouts, is_unsure
from rematplan.runtime.execute.compiled_plan import CompiledPlan
from rematplan.runtime.fuse.kernel import FusedKernel
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.tracked_sizes import SizeValues
from rematplan.runtime.symbols.expressions import OpenSize
from rematplan.runtime.symbols.symbolic_step import OpenStep, Size

PATTERNS = 64
"""The largest number of patterns of equal sizes whose structure is remembered; the oldest ones are forgotten."""
STRUCTURES = 4
"""The largest number of structures whose plans are kept; those for which a problem was learned last are kept."""
SizePattern: TypeAlias = tuple[int, ...]
Layout: TypeAlias = tuple[tuple[Size, ...], tuple[Size, ...]]
"""Shape and strides."""


@dataclass(eq=False)
class _StepStructure:
    """The captured steps of one structure (the same calls and tensors, apart from sizes), and their plans."""

    step: CapturedStep
    """One of the steps, with its inverses and fused kernels."""
    structure: Hashable
    """The result of `structure_of` for each of the steps."""
    carrier: Planner
    """Adds inverses and fused kernels to the steps."""
    resizing: Resizing | None
    """The problems and known plans of the steps; None if problems have several structures, so that no plan serves
    other sizes."""
    sources: dict[bytes, CompiledPlan] = field(default_factory=dict)
    """Compiled plans that serve all sizes, by the key of the schedule, the one used last at the end."""

    @cached_property
    def kernels(self) -> tuple[FusedKernel, ...]:
        """The fused kernels of the steps."""
        return tuple(call.target for call in self.step.calls if isinstance(call.target, FusedKernel))

    def compiled(self, key: bytes, made: StepPlan, most: int) -> CompiledPlan:
        """Return the compiled form of a plan for all sizes, from ``sources`` or new. At most ``most`` are kept."""
        found = self.sources.get(key)
        if found is None:
            found = CompiledPlan(self.step, made.plan.schedule, spare=made.spare, for_any_sizes=True)
        return remember(self.sources, key, found, most)


@dataclass(eq=False)
class SizedPlans:
    """The problems and plans of a captured step with symbolic sizes, known for the sizes of some batches and used
    for others."""

    step: OpenStep
    """The step."""
    most: int
    """The largest number of compiled sources that are kept for one structure of steps."""
    _structures: list[_StepStructure] = field(default_factory=list)
    """The structures of steps, the one for which a problem was learned last at the end."""
    _of_pattern: dict[SizePattern, _StepStructure | None] = field(default_factory=dict)
    """By the pattern of equal sizes, the structure that all steps with this pattern had; None if they had several."""

    @property
    def learned(self) -> bool:
        """Whether a planning problem is known for at least one batch (see `learn`)."""
        return bool(self._structures)

    @property
    def sources(self) -> int:
        """The number of compiled sources, each of which serves all sizes."""
        return sum(len(one.sources) for one in self._structures)

    def learn(
        self,
        sizes: SizeValues,
        batch: Sequence[torch.Tensor],
        step: CapturedStep,
        problem: TrainingGraph,
        carrier: Planner,
    ) -> None:
        """Remember a batch's problem for plans at other sizes; the latest `STRUCTURES` structures of steps are kept.
        ``carrier`` is kept with a new structure; it added the inverses. No plan serves other sizes of a pattern of
        equal sizes if its steps have several structures, or their problems differ in more than sizes."""
        pattern, structure = self._pattern(sizes), structure_of(step)
        alike = next((one for one in self._structures if one.structure == structure), None)
        if alike is None:
            alike = _StepStructure(step, structure, carrier, carrier.resizing(step, problem, self._storages))
        if not (alike.resizing and alike.resizing.add(sizes, self._bytes(sizes, batch), problem)):
            alike.resizing = None
        others = [one for one in self._structures if one is not alike]
        self._structures = [*others[1 - STRUCTURES :], alike]
        known = self._of_pattern.get(pattern, alike)
        remember(self._of_pattern, pattern, alike if known is alike else None, PATTERNS)

    def carried(self, sizes: SizeValues, batch: Sequence[torch.Tensor]) -> StepPlan | None:
        """Return the cheapest known plan that fits for a batch, with a ``step`` of other sizes; None if no plan is
        known to fit, or a fused kernel does not serve these sizes. `NotSymbolic` if an op returns other strides at
        these sizes."""
        alike = self._of_pattern.get(self._pattern(sizes))
        if alike is None or alike.resizing is None or not all(k.serves(sizes) for k in alike.kernels):
            return None
        bytes_ = self._bytes(sizes, batch)
        self._check_layouts(sizes)
        return alike.resizing.plan(sizes, bytes_)

    def compiler(
        self, sizes: SizeValues, made: Callable[[], CapturedStep]
    ) -> Callable[[StepPlan], CompiledPlan] | None:
        """Return a function that compiles plans for certain sizes, each schedule once for all sizes. None if no
        batch of this pattern was learned, or they had several structures. ``made``: makes the captured step of these
        sizes."""
        alike = self._of_pattern.get(self._pattern(sizes))
        if alike is None or alike.resizing is None:
            return None
        key, source, most, as_planned = (
            alike.resizing.key,
            alike.compiled,
            self.most,
            alike.carrier.as_planned,
        )

        def compile_(found: StepPlan) -> CompiledPlan:
            unused = found.unused if found.rounds else ()
            return source(key(found.plan.schedule), found, most).at(sizes, lambda: as_planned(made()), unused)

        return compile_

    def _check_layouts(self, sizes: SizeValues) -> None:
        """Raise `NotSymbolic` if an op returns other strides at these sizes than stated. Only calls that may do so,
        since an argument is not contiguous, are run."""
        doubtful = [
            call
            for call, operands in self._unsure
            if not all(_is_plain(shape, stride, sizes) for shape, stride in operands)
        ]
        if doubtful:
            check_layouts(self.step.excerpt(sizes, doubtful))

    @cached_property
    def _unsure(self) -> tuple[tuple[Call, tuple[Layout, ...]], ...]:
        """The calls whose results may have other strides than in the trace, even if no size is 1, with their arguments'
        shapes and strides."""
        values = self.step.values
        return tuple(
            (call, tuple((values[name].shape, values[name].stride) for name in call.operands))
            for call in self.step.calls
            if is_unsure(call.target, ones=False)
        )

    def _pattern(self, sizes: SizeValues) -> SizePattern:
        """Return a key: which size expressions are equal to each other, and which to which plain integer of the step.
        Under the capture's guard, batches with equal keys have one structure."""
        found: list[int] = []
        for places, numbers in self._compared:
            first: dict[int, int] = {}
            found += [
                # An integer of the step, or the position of the first expression of equal value, above all
                # these integers.
                sizes[at] if sizes[at] in numbers else self._beyond + first.setdefault(sizes[at], at)
                for at in places
            ]
        return tuple(found)

    @cached_property
    def _compared(self) -> tuple[tuple[tuple[int, ...], frozenset[int]], ...]:
        """What `_pattern` compares: for shapes, strides and offsets, then for bytes, the positions of expressions, and
        the plain integers. The first integers include 0 and 1."""
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
        """By the name of each storage of the step, the number of the memory (the storage in PyTorch) that contains it,
        and the device."""
        return {v.storage: (v.memory, v.device) for v in self.step.values.values()}

    @cached_property
    def _storages(self) -> tuple[str, ...]:
        return tuple(self._memory_of)

    @cached_property
    def _fixed_bytes(self) -> Ints:
        return np.array([0 if isinstance(m, OpenSize) else m for m in self.step.memories], dtype=np.int64)

    @cached_property
    def _open_bytes(self) -> tuple[Ints, Ints]:
        """Two arrays of equal length: the numbers of the memories whose bytes are expressions, and the positions of
        these expressions."""
        rows = [(k, m.at) for k, m in enumerate(self.step.memories) if isinstance(m, OpenSize)]
        return np.array([k for k, _ in rows], dtype=np.int64), np.array(
            [at for _, at in rows], dtype=np.int64
        )

    @cached_property
    def _memories(self) -> Ints:
        """For each storage, in the order of ``_storages``, the number of the memory that contains it."""
        return np.array([memory for memory, _ in self._memory_of.values()], dtype=np.int64)

    def _bytes(self, sizes: SizeValues, batch: Sequence[torch.Tensor]) -> Ints:
        """Return the bytes of each storage, in the order of ``_storages``, as its device's allocator counts them."""
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


def _is_plain(shape: Sequence[Size], stride: Sequence[Size], sizes: SizeValues) -> bool:
    """Return whether a tensor, whose shape and stride may have expressions, has the strides of a new contiguous one."""
    expected = 1
    for dim in reversed(range(len(shape))):
        size, step = (sizes[n.at] if isinstance(n, OpenSize) else n for n in (shape[dim], stride[dim]))
        if step != expected:
            return False
        expected *= max(size, 1)
    return True
