"""The captures with open sizes of a planned module: which shapes they serve, and why other shapes are
captured separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime import guards
from rematplan.runtime.capture.flat_module import Given, Own, Place
from rematplan.runtime.capture.hidden_tensors import Withheld, hides_tensors
from rematplan.runtime.capture.patches.fake_layouts import check_layouts
from rematplan.runtime.capture.read_fx import finished
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.module.step_comparison import names_of
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, opened, resolved
from rematplan.runtime.symbols.full_slices import without_full_slices
from rematplan.runtime.symbols.symbolic_step import OpenStep

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
"""Types of values among a forward's outputs that cannot contain a hidden size."""
MISSES = 2
"""The number of consecutive captures with open sizes that served no other known shape, after which no more
are made."""
SHAPES_MET = 1024
"""The number of shapes that are remembered as met."""
REMEMBERED = 4
"""The number of known shapes against which a new capture with open sizes is checked."""


@dataclass(frozen=True)
class Found:
    """The result of tracing a forward and its backward for one combination of sizes.

    ``step``: the captured step, before planning. ``outputs``, ``constants``: the pytree structure and the leaves of
    the forward's outputs, as in `FlatModel`. ``guard``: the check that everything else on which the trace depends is
    unchanged.
    """

    step: CapturedStep
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    guard: guards.Guard
    count: int
    """The number of tensors among the outputs."""


@dataclass(frozen=True)
class _Shape:
    """A `torch.Size` among the outputs, with open sizes."""

    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class OpenForward:
    """The result of tracing a forward and its backward with open sizes: expressions of the sizes of the arguments.

    ``step``, ``constants``, ``guard``: as in `Found`, but with open sizes. ``outputs``, ``count``: as in `Found`.
    ``attributes``: as in `FlatModel`.
    """

    step: OpenStep
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    attributes: frozenset[str]
    guard: guards.Guard
    count: int

    def found(self, state: guards.ModuleState | None, batch: Sequence[torch.Tensor]) -> Found | None:
        """Return the trace with the sizes of a batch put in; None if the batch or the state does not satisfy the
        guard.

        Args:
            state: the module's state; None if it is known to satisfy the guard.
            batch: the tensors among the arguments.

        Raises:
            NotSymbolic: the sizes of the batch cannot be used, although the guard holds.
        """
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
    """Return the leaves of a forward's outputs with each symbolic size replaced by an expression of the table.

    Args:
        constants: the leaves, as in `FlatModel.constants`.
        table: the expressions of the trace; expressions that it lacks are added.

    Raises:
        NotSymbolic: a leaf has a type that may contain hidden sizes.
    """
    return [_open(c, table) for c in constants]


def _open(constant: Any, table: ExpressionTable) -> Any:
    if isinstance(constant, torch.Size):
        return _Shape(tuple(opened(list(constant), table.add)))
    if isinstance(constant, torch.SymInt):
        return table.add(constant)
    seen = isinstance(constant, (Place, Given, Own, Withheld, *PLAIN)) or hides_tensors(
        constant, called_later=True
    )
    if not seen:
        raise NotSymbolic(f"it gives a {type(constant).__name__}")
    return constant


def _closed(constant: Any, sizes: Sequence[int]) -> Any:
    if isinstance(constant, _Shape):
        return torch.Size(resolved(constant.sizes, sizes))
    return resolved(constant, sizes) if not isinstance(constant, (list, tuple, dict)) else constant


def _smallest(batch: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return the sizes 0 and 1 of a batch, with positions and dimensions. They have graphs of their own."""
    return [
        (at, dim, size) for at, t in enumerate(batch) for dim, size in enumerate(t.shape) if size in (0, 1)
    ]


@dataclass
class OpenShapes:
    """The captures for calls that differ only in sizes: those with open sizes, and a record of the others.

    ``forwards``: the newest first. ``known``: shapes that were captured separately: fake batches, and the
    results. ``met``: all shapes of calls so far. ``misses``: how many captures with open sizes in a row served
    no other known shape, although one has the same sizes of 0 and 1. ``reason``: why no more captures with
    open sizes are made; empty if they are. ``fixed``: the number of shapes that were captured separately.
    ``served``: how often a shape got its step from a forward with open sizes. ``exceptions``: why some shapes
    did not.
    """

    forwards: list[OpenForward] = field(default_factory=list)
    known: list[tuple[list[torch.Tensor], Found]] = field(default_factory=list)
    met: dict[tuple[torch.Size, ...], None] = field(default_factory=dict)
    misses: int = 0
    reason: str = ""
    fixed: int = 0
    served: int = 0
    exceptions: dict[str, None] = field(default_factory=dict)

    def copy(self) -> OpenShapes:
        """Return a copy for a copy of the module: later captures of one of them do not appear in the other."""
        return replace(
            self,
            forwards=list(self.forwards),
            known=list(self.known),
            met=dict(self.met),
            exceptions=dict(self.exceptions),
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why shapes are captured separately, without repetition; empty if captures with open sizes served all."""
        return tuple(filter(None, (self.reason, *self.exceptions)))

    def find(
        self,
        state: guards.ModuleState,
        batch: Sequence[torch.Tensor],
        opened: Callable[[], OpenForward],
        fixed: Callable[[], Found],
    ) -> Found:
        """Return the trace for a batch: from a capture with open sizes, or by capturing the batch's shape separately.

        The first shape is captured separately, so that training does not wait for the longer capture with open sizes.

        Args:
            state: the module's state.
            batch: the tensors among the arguments.
            opened: captures with open sizes.
            fixed: captures for the sizes of this batch.

        Raises:
            ModelError: the step cannot be captured.
        """
        shapes = tuple(t.shape for t in batch)
        try:
            found = self._instance(state, batch)
            if found is None and self.known and not self.reason and shapes not in self.met:
                found = self._opened(state, batch, opened, fixed)
        except NotSymbolic as error:
            self.exceptions[str(error)] = None
            found = None
        if found is None:
            found = self._fixed(fixed)
        self.met[shapes] = None
        if len(self.met) > SHAPES_MET:
            del self.met[next(iter(self.met))]
        return found

    def _instance(self, state: guards.ModuleState, batch: Sequence[torch.Tensor]) -> Found | None:
        for forward in self.forwards:
            found = forward.found(state, batch)
            if found is not None:
                self.misses = 0
                self.served += 1
                return found
        return None

    def _fixed(self, fixed: Callable[[], Found]) -> Found:
        found = fixed()
        self.fixed += 1
        self._remember(found)
        return found

    def _opened(
        self,
        state: guards.ModuleState,
        batch: Sequence[torch.Tensor],
        opened: Callable[[], OpenForward],
        fixed: Callable[[], Found],
    ) -> Found | None:
        """Return the forward for a batch from a new capture with open sizes, None if it has none.

        That capture is compared with those of known shapes that it serves, or else with one of this shape: a
        model that treats a symbol differently from an integer (its text, its type) is never served by it.
        """
        own = None
        try:
            forward = opened()
            served, forward = self._compared(forward, state)
            if not served:
                own = self._fixed(fixed)
                _, forward = self._compared(forward, state)
        except ModelError as error:
            self.reason = str(error)
            return own
        found = own or forward.found(state, batch)
        self.served += own is None and found is not None
        self.forwards.insert(0, forward)
        alike = [known for known, _ in self.known if _smallest(known) == _smallest(batch)]
        self.misses = 0 if served else self.misses + (len(alike) > 1)
        if self.misses >= MISSES:
            varying = [
                f"dimension {dim} of argument {at} ({size})"
                for at, dim, size in forward.step.fixed
                if any(known[at].shape[dim] != size for known, _ in self.known)
            ]
            self.reason = ": ".join(("its graph depends on sizes", *filter(None, [", ".join(varying)])))
        return found

    def _compared(self, forward: OpenForward, state: guards.ModuleState) -> tuple[bool, OpenForward]:
        """Compare a new forward with shapes that were captured separately. Return whether it serves one of
        them, and the forward with the names of calls and values of that shape's step.

        Raises:
            NotSymbolic: it makes other calls.
        """
        served = False
        for batch, known in self.known:
            outcomes = known.guard.decided.outcomes == forward.guard.decided.outcomes
            if not (outcomes and known.guard.holds_for(state)):
                continue
            found = forward.found(None, batch)
            if found is None:
                continue
            served = True
            names = names_of(found.step, known.step)
            if names is None:
                raise NotSymbolic("with open sizes it makes other calls than with fixed ones")
            forward = replace(forward, step=forward.step.renamed(names))
        return served, forward

    def _remember(self, found: Found) -> None:
        step = found.step
        batch = {int(i.target): step.values[i.value].fake for i in step.inputs if i.kind == "batch"}
        if sorted(batch) == list(range(len(batch))):
            self.known = [*self.known, ([batch[at] for at in range(len(batch))], found)][-REMEMBERED:]
