"""Steps that were captured with open sizes, for the calls of a planned module: which shapes they serve, and why not
others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime import guards
from rematplan.runtime.capture.flat_module import Given, Own, Place
from rematplan.runtime.capture.hidden_tensors import hides_tensors
from rematplan.runtime.capture.patches.fake_layouts import check_layouts
from rematplan.runtime.capture.read_fx import finished
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.module.same_structure import names_of
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, opened, resolved
from rematplan.runtime.symbols.full_slices import without_full_slices
from rematplan.runtime.symbols.open_step import OpenStep

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
"""Types of values among a forward's outputs that hold no size which is not seen."""
MISSES = 2
"""Captures with open sizes that served no other shape met so far, in a row, after which no further one is made."""
REMEMBERED = 4
"""Shapes that a new capture with open sizes is tried on."""


@dataclass(frozen=True)
class Found:
    """What a forward was found to do: its step, before there is a plan of it; the structure and the leaves of its
    outputs; and what it depends on."""

    step: CapturedStep
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    guard: guards.Guard
    count: int
    """Of the tensors among the outputs."""


@dataclass(frozen=True)
class _Shape:
    """Stands for a `torch.Size` among the outputs."""

    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class OpenForward:
    """A forward with open sizes. ``guard``, ``constants``: with open sizes."""

    step: OpenStep
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    attributes: frozenset[str]
    guard: guards.Guard
    count: int

    def found(self, state: guards.ModuleState | None, batch: Sequence[torch.Tensor]) -> Found | None:
        """The forward for a batch; None if it is another one. ``state``: of the module; None if it is known to be the
        same."""
        if not self.step.guard.holds(batch):
            return None
        sizes = self.step.sizes(batch)
        guard = self.guard.mapped(lambda given: resolved(given, sizes))
        if state is not None and not guard.holds(state, batch):
            return None
        step = finished(without_full_slices(self.step.at(batch, sizes)))
        check_layouts(step)
        constants = tuple(_closed(c, sizes) for c in self.constants)
        return Found(replace(step, attributes=self.attributes), self.outputs, constants, guard, self.count)


def open_constants(constants: Sequence[Any], table: ExpressionTable) -> list[Any]:
    """The leaves of a forward's outputs, with open sizes.

    Raises:
        NotSymbolic: one is of a type that may hold sizes that are not seen.
    """
    return [_open(c, table) for c in constants]


def _open(constant: Any, table: ExpressionTable) -> Any:
    if isinstance(constant, torch.Size):
        return _Shape(tuple(opened(list(constant), table.add)))
    if isinstance(constant, torch.SymInt):
        return table.add(constant)
    seen = isinstance(constant, (Place, Given, Own, *PLAIN)) or hides_tensors(constant, called_later=True)
    if not seen:
        raise NotSymbolic(f"it gives a {type(constant).__name__}")
    return constant


def _closed(constant: Any, sizes: Sequence[int]) -> Any:
    if isinstance(constant, _Shape):
        return torch.Size(resolved(constant.sizes, sizes))
    return resolved(constant, sizes) if not isinstance(constant, (list, tuple, dict)) else constant


@dataclass
class OpenShapes:
    """The forwards with open sizes for one way of calling a module.

    ``known``: batches of shapes that were captured by themselves, of fakes, and their steps. ``reason``: why further
    shapes are captured one by one, if they are. ``fixed``, ``served``: how many shapes were captured by themselves, and
    how many got their step from a forward with open sizes.
    """

    forwards: list[OpenForward] = field(default_factory=list)
    known: list[tuple[list[torch.Tensor], CapturedStep]] = field(default_factory=list)
    misses: int = 0
    reason: str = ""
    fixed: int = 0
    served: int = 0
    newest: OpenForward | None = None
    """The latest forward, until it has served the shape that it was traced with."""

    def copy(self) -> OpenShapes:
        """One for a copy of the module."""
        return replace(self, forwards=list(self.forwards), known=list(self.known))

    @property
    def tries(self) -> bool:
        """Whether the next shape that no forward serves is to be captured with open sizes."""
        return bool(self.known) and not self.reason

    def refuse(self, error: ModelError) -> None:
        """No capture with open sizes is tried any more."""
        self.reason = str(error)

    def meet(self, step: CapturedStep) -> None:
        """Note a shape that was captured by itself."""
        self.fixed += 1
        batch = {int(i.target): step.values[i.value].fake for i in step.inputs if i.kind == "batch"}
        if sorted(batch) == list(range(len(batch))):
            self.known = [*self.known, ([batch[at] for at in range(len(batch))], step)][-REMEMBERED:]

    def find(self, state: guards.ModuleState, batch: Sequence[torch.Tensor]) -> Found | None:
        """The forward for a batch, if one serves it."""
        for forward in self.forwards:
            try:
                found = forward.found(state, batch)
            except NotSymbolic as error:
                self.reason = self.reason or str(error)
                continue
            if found is not None:
                self.misses = self.misses if forward is self.newest else 0
                self.newest = None
                self.served += 1
                return found
        return None

    def add(self, forward: OpenForward) -> None:
        """Take in a forward, under the names that a step has which was captured by itself; for the shapes of such it
        must be the same step.

        Raises:
            NotSymbolic: it is not.
        """
        served = False
        for batch, step in self.known:
            found = forward.found(None, batch)
            if found is None:
                continue
            served = True
            names = names_of(found.step, step)
            if names is None:
                raise NotSymbolic("with open sizes it makes other calls than with fixed ones")
            forward = replace(forward, step=forward.step.renamed(names))
        self.forwards.insert(0, forward)
        self.newest = forward
        self.misses = 0 if served else self.misses + 1
        if self.misses >= MISSES:
            fixed = ", ".join(
                f"dimension {d} of argument {at} ({size})" for at, d, size in forward.step.fixed
            )
            self.reason = f"its graph depends on sizes: {fixed}" if fixed else "its graph depends on sizes"
