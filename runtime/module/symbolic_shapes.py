"""The captures of a planned module with symbolic sizes, called open sizes. A capture with open sizes serves all shapes
for which the graph is the same; other shapes are captured separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch

from rematplan.ir import ModelError
from rematplan.runtime import guards
from rematplan.runtime.capture.flat_module import ArgumentLeaf, ModuleTensor, ResultTensor
from rematplan.runtime.capture.hidden_tensors import Withheld, hides_tensors
from rematplan.runtime.capture.patches.fake_layouts import check_layouts
from rematplan.runtime.capture.read_fx import finished
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.tracked_sizes import Sizes
from rematplan.runtime.module.sized_plans import SizedPlans
from rematplan.runtime.module.step_comparison import names_of
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, opened, resolved
from rematplan.runtime.symbols.full_slices import without_full_slices
from rematplan.runtime.symbols.symbolic_step import OpenStep

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
"""Types of values among a forward's outputs that cannot contain a hidden size."""
MISSES = 2
"""The number of consecutive captures with symbolic sizes that served no other known shape, after which no more are
made."""
SHAPES_MET = 1024
"""The number of shapes of calls that are remembered, so that a shape which was seen before starts no symbolic
capture."""
REMEMBERED = 4
"""The number of separately captured shapes with which a new capture with symbolic sizes is compared."""
Dimensions: TypeAlias = frozenset[tuple[int, int]]
"""Pairs: the position of a tensor in a batch, and a dimension."""


@dataclass(frozen=True)
class Found:
    """The result of tracing a forward and its backward for one combination of sizes.

    ``step``: the captured step, before planning. ``outputs``: the pytree structure of the forward's results, of the
    attributes that it sets, and of the arguments that it changes (see `FlatModel`). ``constants``: the leaves of that
    structure; a placeholder represents each tensor. ``guard``: the check that everything else on which the trace
    depends is unchanged.
    """

    step: CapturedStep
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    guard: guards.Guard
    count: int
    """The number of tensors that the step returns as outputs."""
    instance: Instance | None = None
    """Where the step comes from, if it is an instance of a forward with symbolic sizes."""


@dataclass(frozen=True)
class Instance:
    """A capture with symbolic sizes together with the sizes of one batch, from which a captured step with integer sizes
    can be made.

    ``forward``: the capture. ``sizes``: the values, for this batch, of all size expressions in the capture. ``batch``:
    the batch's tensors without their data: on the device ``meta``, with the same sizes, strides and storage sizes.
    """

    forward: OpenForward
    sizes: Sizes
    batch: Sequence[torch.Tensor]

    def step(self) -> CapturedStep:
        """Make the captured step for this batch, before planning. Each call makes another object.

        Raises:
            NotSymbolic: the sizes of the batch cannot be used.
        """
        return self.forward.step_at(self.batch, self.sizes)


@dataclass(frozen=True)
class _Shape:
    """A `torch.Size` among a forward's results, some of whose sizes are expressions of the batch's sizes.

    ``sizes``: integers, and `OpenSize` objects for the expressions.
    """

    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class OpenForward:
    """The result of tracing a forward and its backward with symbolic sizes: with expressions of the sizes of the
    arguments in place of integers.

    ``step``, ``constants``, ``guard``: as in `Found`, but with expressions in place of sizes. ``outputs``, ``count``:
    as in `Found`. ``attributes``: the positions, as text, of output tensors that occur only in attributes set by the
    forward.
    """

    step: OpenStep
    outputs: pytree.TreeSpec
    constants: tuple[Any, ...]
    attributes: frozenset[str]
    guard: guards.Guard
    count: int

    def found(self, state: guards.ModuleState | None, batch: Sequence[torch.Tensor]) -> Found | None:
        """Return the trace for the sizes of a batch: a copy of this one in which each symbolic size is replaced by its
        value. Return None if the batch or the module's state does not satisfy the guard, so that this trace is not
        valid for it.

        Args:
            state: the module's state; None if it is known to satisfy the guard.
            batch: the tensors among the arguments.

        Raises:
            NotSymbolic: the guard holds, but the trace cannot be made with the sizes of the batch.
        """
        accepted = self.accepted(state, batch)
        if accepted is None:
            return None
        instance, guard = accepted
        step = self.step_at(batch, instance.sizes)
        return Found(step, self.outputs, self.constants_at(instance.sizes), guard, self.count, instance)

    def accepted(
        self, state: guards.ModuleState | None, batch: Sequence[torch.Tensor]
    ) -> tuple[Instance, guards.Guard] | None:
        """Return this capture with the sizes of a batch, as an `Instance` without a step, and the guard for these
        sizes. Return None if the batch or the module's state does not satisfy the guard.

        Args:
            state: the module's state; None if it is known to satisfy the guard.
            batch: the tensors among the arguments.
        """
        if not self.step.guard.holds(batch):
            return None
        sizes = self.step.sizes(batch)
        guard = self.guard.mapped(lambda given: resolved(given, sizes))
        if state is not None and not guard.holds(state, batch):
            return None
        return Instance(self, sizes, [_outline(tensor) for tensor in batch]), guard

    def step_at(self, batch: Sequence[torch.Tensor], sizes: Sizes) -> CapturedStep:
        """Make the captured step for a batch, before planning.

        ``batch``: the tensors among the arguments. ``sizes``: the values, for this batch, of all size expressions in
        ``step``.

        Raises:
            NotSymbolic: the sizes of the batch cannot be used.
        """
        step = finished(without_full_slices(self.step.at(batch, sizes)))
        check_layouts(step)
        return replace(step, attributes=self.attributes)

    def constants_at(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return the leaves of the forward's results, like `FlatModel.constants`, with integers in place of expressions
        of sizes. ``sizes``: the values of all size expressions."""
        return tuple(_closed(c, sizes) for c in self.constants)

    def plans(self, arrived: frozenset[str], most: int) -> SizedPlans:
        """Return the object that uses plans of this capture's steps at other sizes. There is one for each set
        ``arrived``.

        ``arrived``: positions (as text) of outputs for which an earlier backward received an unexpected gradient.
        ``most``: the largest number of compiled sources that are kept for one structure of steps.
        """
        return self._plans.setdefault(arrived, SizedPlans(self.step, most))

    @cached_property
    def _plans(self) -> dict[frozenset[str], SizedPlans]:
        return {}


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device ``meta`` with the type, sizes, strides, offset and storage size of ``tensor``."""
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def open_constants(constants: Sequence[Any], table: ExpressionTable) -> list[Any]:
    """Return the leaves of a forward's results with each symbolic size replaced by an integer, if it is constant, or
    else by a reference to its expression in ``table``.

    Args:
        constants: the leaves, as in `FlatModel.constants`.
        table: the expressions of the trace. An expression that it lacks is added.

    Raises:
        NotSymbolic: a leaf is of a type that may contain sizes which are not found.
    """
    return [_open(c, table) for c in constants]


def _open(constant: Any, table: ExpressionTable) -> Any:
    if isinstance(constant, torch.Size):
        return _Shape(tuple(opened(list(constant), table.add)))
    if isinstance(constant, torch.SymInt):
        return table.add(constant)
    seen = isinstance(
        constant, (ResultTensor, ArgumentLeaf, ModuleTensor, Withheld, *PLAIN)
    ) or hides_tensors(constant, called_later=True)
    if not seen:
        raise NotSymbolic(f"it gives a {type(constant).__name__}")
    return constant


def _closed(constant: Any, sizes: Sequence[int]) -> Any:
    if isinstance(constant, _Shape):
        return torch.Size(resolved(constant.sizes, sizes))
    return resolved(constant, sizes) if not isinstance(constant, (list, tuple, dict)) else constant


def _smallest(batch: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return where a batch has the sizes 0 and 1, as tuples (position of the tensor, dimension, size). PyTorch treats
    these sizes specially, so batches that differ in them have different graphs."""
    return [
        (at, dim, size) for at, t in enumerate(batch) for dim, size in enumerate(t.shape) if size in (0, 1)
    ]


@dataclass
class OpenShapes:
    """The captures of a planned module for calls that differ only in the sizes of their tensors. A shape is served by a
    capture with symbolic sizes, if there is one for it, or else captured separately.

    ``forwards``: the captures with symbolic sizes, the one used last first. ``opened``: how many of them were made,
    those included that were dropped since. ``known``: the last shapes that were captured separately: fake tensors of
    these shapes, and the results. ``met``: the last shapes of calls, as keys. ``misses``: how many of the latest
    captures with symbolic sizes, in succession, served no known shape but that of their own batch, although another
    known shape had sizes of 0 and 1 in the same dimensions as the batch. ``reason``: why no more captures with symbolic
    sizes are made; empty if they are. ``limited``: why not all sizes can be symbolic, so that further captures have
    symbols only for the sizes in which the batch differs from a known shape; empty if all sizes get symbols.

    ``fixed``: the number of shapes that were captured separately. ``served``: how often a shape was served by a capture
    with symbolic sizes. ``carried``: how many of these needed neither a step nor a search, because a plan made at other
    sizes was used. ``exceptions``: the reasons (as keys) why single shapes were captured separately.
    """

    forwards: list[OpenForward] = field(default_factory=list)
    opened: int = 0
    known: list[tuple[list[torch.Tensor], Found]] = field(default_factory=list)
    met: dict[tuple[torch.Size, ...], None] = field(default_factory=dict)
    misses: int = 0
    reason: str = ""
    limited: str = ""
    fixed: int = 0
    served: int = 0
    carried: int = 0
    exceptions: dict[str, None] = field(default_factory=dict)

    def copy(self) -> OpenShapes:
        """Return a copy, for a copy of the module. Captures that are later added to one of the two do not appear in the
        other."""
        return replace(
            self,
            forwards=list(self.forwards),
            known=list(self.known),
            met=dict(self.met),
            exceptions=dict(self.exceptions),
        )

    @property
    def sources(self) -> int:
        """The number of compiled sources that serve all sizes."""
        return sum(plans.sources for forward in self.forwards for plans in forward._plans.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        """Texts that say why shapes were captured separately, or with few symbolic sizes, each once. They are empty if
        nothing prevents captures in which all sizes are symbolic."""
        limited = self.limited and f"only sizes that vary are symbolic: {self.limited}"
        return tuple(filter(None, (self.reason or limited, *self.exceptions)))

    def find(
        self,
        state: guards.ModuleState,
        batch: Sequence[torch.Tensor],
        opened: Callable[[Dimensions | None], OpenForward],
        fixed: Callable[[], Found],
    ) -> Found:
        """Return the captured step for the shapes of a batch, with its results and its guard. Take it from a capture
        with symbolic sizes if possible; otherwise capture these shapes separately.

        The first shape is captured separately, because a capture with symbolic sizes takes longer and training would
        wait for it.

        Args:
            state: the module's state.
            batch: the tensors among the arguments.
            opened: a function that captures the forward with symbolic sizes. Its argument: the dimensions whose sizes
                are symbolic; None for all.
            fixed: a function that captures the forward for the sizes of this batch.

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

    def accepted(
        self, state: guards.ModuleState, batch: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Instance, guards.Guard]]:
        """Yield the captures with symbolic sizes that are valid for a batch, each as an `Instance` with the batch's
        sizes, and the guard for these sizes."""
        for forward in self.forwards:
            with suppress(NotSymbolic):
                found = forward.accepted(state, batch)
                if found is not None:
                    yield found

    def carry(self, forward: OpenForward) -> None:
        """Count a shape that was served by the capture ``forward`` with a plan of other sizes, so that its step was not
        made."""
        self._use(forward)
        self.carried += 1

    def known_instances(self, forward: OpenForward) -> Iterator[Instance]:
        """Yield, for each known shape (one that was captured separately) for which the capture ``forward`` with
        symbolic sizes is valid, that capture with the shape's sizes."""
        for batch, known in self.known:
            with suppress(NotSymbolic):
                outcomes = known.guard.decided.outcomes == forward.guard.decided.outcomes
                found = forward.accepted(None, batch) if outcomes else None
                if found is not None:
                    yield found[0]

    def _instance(self, state: guards.ModuleState, batch: Sequence[torch.Tensor]) -> Found | None:
        for forward in self.forwards:
            found = forward.found(state, batch)
            if found is not None:
                self._use(forward)
                return found
        return None

    def _use(self, forward: OpenForward) -> None:
        self.misses = 0
        self.served += 1
        self._put_first(forward)

    def _put_first(self, forward: OpenForward) -> None:
        others = [one for one in self.forwards if one is not forward]
        self.forwards = [forward, *others]

    def _fixed(self, fixed: Callable[[], Found]) -> Found:
        found = fixed()
        self.fixed += 1
        self._remember(found)
        return found

    def _opened(
        self,
        state: guards.ModuleState,
        batch: Sequence[torch.Tensor],
        opened: Callable[[Dimensions | None], OpenForward],
        fixed: Callable[[], Found],
    ) -> Found | None:
        """Make a new capture with symbolic sizes, and return the step for this batch.

        The new capture is compared with the known shapes that it serves. If there are none, it is compared with a
        separate capture for this batch, which is then returned. If the calls of the two captures differ, the new
        capture is dropped. So a model that treats a symbolic size differently from an integer (by its type) is captured
        separately. A new capture that cannot be compared is dropped, too.

        If a capture in which all sizes are symbolic fails, or its calls differ, a second one is made. In it, only those
        sizes are symbolic in which the batch differs from a known shape, such as the number of samples. If that one
        fails as well, or if the batch differs in all sizes, no further captures with symbolic sizes are made.

        Args:
            state: the module's state.
            batch: the tensors among the arguments.
            opened: as for `find`.
            fixed: a function that captures the forward for the sizes of this batch.

        Returns:
            The step for this batch. None if no separate capture was made, and the new capture fails or is not valid for
                this batch.
        """
        own, differing = None, self._differing(batch)
        try:
            forward = opened(differing if self.limited else None)
            served, forward = self._compared(forward, state)
            checked = served
            if not served:
                own = self._fixed(fixed)
                checked, forward = self._compared(forward, state)
        except ModelError as error:
            if not self.limited and len(differing) < sum(t.ndim for t in batch):
                self.limited = str(error)
                return self._opened(state, batch, opened, fixed)
            self.reason = str(error)
            return own
        found = own or forward.found(state, batch)
        self.served += own is None and found is not None
        if checked:
            self.opened += 1
            self._put_first(forward)
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

    def _differing(self, batch: Sequence[torch.Tensor]) -> Dimensions:
        """Return the dimensions in which a batch differs from at least one known shape."""
        return frozenset(
            (at, dim)
            for known, _ in self.known
            for at, (a, b) in enumerate(zip(known, batch, strict=True))
            for dim, (x, y) in enumerate(zip(a.shape, b.shape, strict=True))
            if x != y
        )

    def _compared(self, forward: OpenForward, state: guards.ModuleState) -> tuple[bool, OpenForward]:
        """Compare a new capture with symbolic sizes with the known shapes, which were captured separately.

        Returns:
            Whether the new capture serves a known shape; and the new capture, with the names of calls and values that
                the separate capture of that shape has.

        Raises:
            NotSymbolic: for a known shape that the new capture serves, its calls differ from those of the separate
                capture.
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
