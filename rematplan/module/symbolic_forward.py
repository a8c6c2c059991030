"""A capture with symbolic sizes, and the captured steps with integer sizes that are made from it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rematplan.module.sized_plans import SizedPlans
from rematplan.planner.caches.latest import remember
from rematplan.runtime import guards
from rematplan.runtime.capture.flat_module import ArgumentLeaf, ModuleTensor, ResultTensor
from rematplan.runtime.capture.hidden_tensors import Withheld, hides_tensors
from rematplan.runtime.capture.patches.fake_layouts import check_layouts
from rematplan.runtime.capture.read_fx import finished
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.tracked_sizes import SizeValues
from rematplan.runtime.guards.repeated_writes import Write
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, opened, resolved
from rematplan.runtime.symbols.full_slices import without_full_slices
from rematplan.runtime.symbols.symbolic_batch import with_counts
from rematplan.runtime.symbols.symbolic_step import OpenStep

KINDS = 8
"""The largest number of kinds of steps (`OpenForward.plans`) of one capture whose plans are used at other sizes."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
"""Types of values among a forward's outputs that cannot contain a hidden size."""


@dataclass(frozen=True)
class Found:
    """The result of tracing a forward and its backward for one combination of sizes."""

    step: CapturedStep
    """The captured step, before planning."""
    outputs: pytree.TreeSpec
    """The pytree structure of the forward's results, the attributes that it sets, and the arguments that it changes."""
    constants: tuple[Any, ...]
    """The leaves of that structure, with a placeholder for each tensor."""
    guard: guards.Guard
    """The check that everything else on which the trace depends is unchanged."""
    count: int
    """The number of tensors that the step returns as outputs."""
    instance: Instance | None = None
    """Where the step comes from, if it is an instance of a forward with symbolic sizes."""


@dataclass(frozen=True)
class Instance:
    """A capture with symbolic sizes, and the sizes of one batch, from which a captured step with integer sizes can be
    made."""

    forward: OpenForward
    """The capture."""
    sizes: SizeValues
    """The values, for this batch, of all size expressions in the capture."""
    batch: Sequence[torch.Tensor]
    """The batch's tensors on the device ``meta``, with equal sizes, strides and storage sizes, and those of counts
    (`with_counts`)."""

    @property
    def counts_around(self) -> tuple[tuple[int, ...], ...]:
        """Half and three halves of the numbers of elements that the forward selects by their values, as by a mask;
        empty if it selects none."""
        several = len(self.forward.guard.decided.counts)
        counts = [len(carrier) for carrier in self.batch[len(self.batch) - several :]]
        return (tuple(n // 2 for n in counts), tuple(n + n // 2 for n in counts)) if counts else ()

    def step(self) -> CapturedStep:
        """Make the captured step for this batch, before planning. Each call makes another object."""
        return self.forward.step_at(self.batch, self.sizes)


@dataclass(frozen=True)
class _Shape:
    """A `torch.Size` among a forward's results, some of whose sizes are expressions of the batch's sizes. ``sizes``:
    integers, and `OpenSize` objects for the expressions."""

    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class OpenForward:
    """The result of tracing a forward and its backward with symbolic sizes: fields as in `Found`, with expressions
    in place of sizes."""

    step: OpenStep
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    attributes: frozenset[str]
    """The positions, as text, of output tensors that occur only in attributes set by the forward."""
    guard: guards.Guard
    count: int

    def found(
        self, state: guards.ModuleState | None, batch: Sequence[torch.Tensor], counts: Sequence[int] = ()
    ) -> Found | None:
        """Return a copy of the trace for the sizes of a batch; None if the batch or the module's state breaks the
        guard. `NotSymbolic` if an op returns other strides than stated."""
        accepted = self.accepted(state, batch, counts)
        if accepted is None:
            return None
        instance, guard = accepted
        step = self.step_at(batch, instance.sizes)
        return Found(step, self.outputs, self.constants_at(instance.sizes), guard, self.count, instance)

    def accepted(
        self, state: guards.ModuleState | None, batch: Sequence[torch.Tensor], counts: Sequence[int] = ()
    ) -> tuple[Instance, guards.Guard] | None:
        """Return this capture at a batch's sizes, with its guard; None if the batch or ``state`` breaks it. If
        ``state`` is None, it is not checked, and the numbers of selected elements are ``counts``."""
        if state is not None and self.guard.decided.counts:
            now = self._counted(state, batch)
            if now is None:
                return None
            counts = now
        sized = with_counts(batch, counts)
        if not self.step.guard.holds(sized):
            return None
        sizes = self.step.sizes(sized)
        guard = self.guard.mapped(lambda given: resolved(given, sizes), counts)
        if state is not None and not guard.holds(state, batch):
            return None
        return Instance(self, sizes, [_outline(tensor) for tensor in sized]), guard

    def _counted(self, state: guards.ModuleState, batch: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        """Return the numbers that the forward takes as sizes for a batch; None if it decides in another way."""
        with suppress(NotSymbolic, ArithmeticError):
            # No recorded call has a size that depends on these numbers, so any numbers serve to find its sizes.
            sizes = self.step.sizes(with_counts(batch, self.guard.decided.counts))
            decided = self.guard.mapped(lambda given: resolved(given, sizes)).decided
            return decided.counted(state.named, batch)
        return None

    def step_at(self, batch: Sequence[torch.Tensor], sizes: SizeValues) -> CapturedStep:
        """Make the captured step for a batch, before planning; `NotSymbolic` if an op returns other strides than
        stated. ``sizes``: the values of all size expressions."""
        step = finished(without_full_slices(self.step.at(batch, sizes)))
        check_layouts(step)
        return replace(step, attributes=self.attributes)

    def constants_at(self, sizes: SizeValues) -> tuple[Any, ...]:
        """Return the leaves of the forward's results, like `FlatModel.constants`, with integers in place of expressions
        of sizes. ``sizes``: the values of all size expressions."""
        return tuple(_closed(c, sizes) for c in self.constants)

    def plans(self, kind: Hashable, most: int) -> SizedPlans:
        """Return what uses plans of this capture's steps at other sizes: one object for each ``kind`` of steps. Kinds
        differ in the outputs with unexpected gradients, and in gradients of earlier steps. The latest are kept."""
        return remember(self._plans, kind, self._plans.get(kind) or SizedPlans(self.step, most), KINDS)

    @cached_property
    def _plans(self) -> dict[Hashable, SizedPlans]:
        return {}


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device ``meta`` with the type, sizes, strides, offset and storage size of ``tensor``."""
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def open_constants(constants: Sequence[Any], table: ExpressionTable) -> list[Any]:
    """Return the leaves of a forward's results with symbolic sizes as integers, if constant, or as references into
    ``table``."""
    return [_open(c, table) for c in constants]


def _open(constant: Any, table: ExpressionTable) -> Any:
    """Return a leaf of a forward's results, its symbolic sizes as integers or references into ``table``. `NotSymbolic`
    for an object that may have hidden sizes."""
    if isinstance(constant, torch.Size):
        return _Shape(tuple(opened(list(constant), table.add)))
    if isinstance(constant, torch.SymInt):
        return table.add(constant)
    seen = isinstance(
        constant, (ResultTensor, ArgumentLeaf, ModuleTensor, Withheld, Write, *PLAIN)
    ) or hides_tensors(constant, called_later=True)
    if not seen and type(constant) is not torch.Tensor:  # one that existed before: results have placeholders
        raise NotSymbolic(f"it gives a {type(constant).__name__}")
    return constant


def _closed(constant: Any, sizes: Sequence[int]) -> Any:
    if isinstance(constant, _Shape):
        return torch.Size(resolved(constant.sizes, sizes))
    return resolved(constant, sizes) if not isinstance(constant, (list, tuple, dict)) else constant
