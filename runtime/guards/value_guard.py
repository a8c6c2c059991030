"""The guard of a forward's decisions by values: recorded calls to run again, and the outcomes they must have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.generator_states import states_restored
from rematplan.runtime.guards.tensor_reads import Plainly

Source = tuple[str, str | int]
"""Where a real tensor comes from: ``("batch", position)`` or ``("buffer", name)``."""
Pools = dict[str, Any]
"""The real tensors: under ``batch`` by position, under ``buffer`` by name."""


@dataclass(frozen=True, slots=True)
class TensorNumber:
    """A reference to a tensor in the arguments of a recorded call. ``place``: the number that `OpTape` assigned to the
    tensor."""

    place: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call of a traced forward, to be executed again with real tensors, by `OpTape`'s numbers."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """With ``call`` and ``args``: the function and its arguments, with a `TensorNumber` in place of each tensor."""
    results: tuple[int | None, ...]
    """The numbers of the resulting tensors; None for a result that is not a tensor."""
    reads: frozenset[int]
    """The storages that the call reads, each by the number of the first tensor in it."""
    touches: frozenset[int]
    """The storages that the call allocates, views or writes, each by the number of the first tensor in it."""
    expected: Any
    """The result, if the forward decided by it; else `UNDECIDED`."""
    draws: torch.device | None = None
    """The generator from which it draws random numbers; None if it draws none."""
    counts: bool = False
    """Whether the result is an integer that the forward takes only as a size."""

    @property
    def decides(self) -> bool:
        """Whether the forward decided by the result."""
        return self.expected is not UNDECIDED


UNDECIDED = object()
"""The expected result of a call by which the forward did not decide."""


@dataclass(frozen=True)
class ValueGuard:
    """A check that a forward would decide as in its trace: it executes the calls that compute decisive values again."""

    entries: tuple[RecordedCall, ...] = ()
    """The recorded calls in order, with the outcomes of the decisions."""
    sources: tuple[tuple[int, Source | torch.Tensor], ...] = ()
    """The tensors that exist before the first call, as pairs: the tensor's number in the recorded calls; and its
    `Source`, or the tensor itself if it is neither an input nor a buffer."""
    written: frozenset[int] = frozenset()
    """The numbers of those tensors in ``sources`` that a recorded call writes to, so that they must be copied."""
    assumed: tuple[bool, ...] = ()
    """The outcomes that the trace assumed of the forward's tests for infinite and NaN values. The step checks them."""

    @property
    def may_change(self) -> bool:
        """Whether another call may decide otherwise: a result depends on a tensor, or on drawn numbers. (That a draw
        from 0 to 1 is below 0 is known to be false.)"""
        return bool(self.sources) or any(entry.draws is not None for entry in self.entries)

    def assumes(self, outcomes: tuple[bool, ...]) -> bool:
        """Return whether the trace assumed these outcomes of the first tests for infinite and NaN values."""
        return self.assumed[: len(outcomes)] == outcomes

    def holds(self, buffers: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]) -> bool:
        """Return whether the forward would decide in the same way for these tensors, by executing the recorded calls
        on them. The tensors are not changed."""
        return all(_same(entry.expected, value) for entry, value in self._decided(buffers, batch))

    def counted(
        self, buffers: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[int, ...] | None:
        """Return the numbers that the forward would take as sizes, in order; None if it would decide otherwise, or a
        call fails."""
        found: list[int] = []
        try:
            for entry, value in self._decided(buffers, batch):
                if entry.counts:
                    found.append(value)
                elif not _same(entry.expected, value):
                    return None
        except (RuntimeError, IndexError, ValueError):  # a call has the sizes of the traced batch
            return None
        return tuple(found)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers that the traced forward took as sizes, in order."""
        return tuple(e.expected for e in self.entries if e.counts)

    def with_counts(self, counts: Sequence[int]) -> ValueGuard:
        """Return a copy of this guard that expects other numbers as sizes."""
        left = iter(counts)
        entries = tuple(replace(e, expected=next(left)) if e.counts else e for e in self.entries)
        return replace(self, entries=entries)

    def _decided(
        self, buffers: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> Iterator[tuple[RecordedCall, Any]]:
        """Execute the recorded calls again, and yield each by which the forward decides, with its outcome."""
        if not self.entries:
            return
        pools: Pools = {"batch": batch, "buffer": buffers}
        drawing = dict.fromkeys(e.draws for e in self.entries if e.draws is not None)
        with Plainly(), states_restored(drawing):
            known = {place: tensor_of(of, pools, place in self.written) for place, of in self.sources}
            yield from ((entry, value) for entry, value in executed(self.entries, known) if entry.decides)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The values by which the forward decided, in order, as text, empty for sizes; then the assumed ones."""
        decided = (e for e in self.entries if e.decides)
        return (*("" if e.counts else repr(e.expected) for e in decided), *map(repr, self.assumed))

    def mapped(self, change: Callable[[Any], Any]) -> ValueGuard:
        """Return a copy of this guard with changed arguments of the recorded calls, to replace sizes by symbols or
        symbols by sizes."""
        entries = (replace(e, args=change(e.args), kwargs=change(e.kwargs)) for e in self.entries)
        return replace(self, entries=tuple(entries))


def each_once(entries: Iterable[RecordedCall], written: Set[int]) -> tuple[RecordedCall, ...]:
    """Return recorded calls without those that repeat an earlier one: the same function of the same arguments. Draws,
    calls that return sizes, and calls on storages that a call writes to (``written``) are all kept."""
    first: dict[Any, RecordedCall] = {}
    same: dict[Any, Any] = {}  # the number of a repeated result → that of the first one

    def renamed(at: TensorNumber) -> TensorNumber:
        return TensorNumber(same.get(at.place, at.place))

    for position, entry in enumerate(entries):
        args, kwargs = pytree.tree_map_only(TensorNumber, renamed, (entry.args, entry.kwargs))
        e = replace(entry, args=args, kwargs=kwargs)
        alone = e.counts or e.draws is not None or not written.isdisjoint(e.reads | e.touches)
        key = position if alone else (e.call, repr((args, kwargs, e.expected)))
        same.update(zip(e.results, first.setdefault(key, e).results, strict=True))
    return tuple(first.values())


def unchanged(value: Any) -> Any:
    """Return the value itself."""
    return value


def executed(
    entries: Iterable[RecordedCall], known: dict[int, torch.Tensor], now: Callable[[Any], Any] = unchanged
) -> Iterator[tuple[RecordedCall, Any]]:
    """Execute recorded calls again and yield each with its result. ``known``: by number, the tensors that calls take;
    those that they return are added. ``now``: is applied to the arguments, for symbolic sizes."""
    for e in entries:
        args = [known[a.place] if type(a) is TensorNumber else _filled(a, known) for a in now(e.args)]
        kwargs = {name: _filled(arg, known) for name, arg in now(e.kwargs).items()} if e.kwargs else {}
        result = e.call(*args, **kwargs)
        if e.results:
            leaves = pytree.tree_leaves(result) if isinstance(result, (list, tuple, dict)) else (result,)
            for place, made in zip(e.results, leaves, strict=False):
                if place is not None:
                    known[place] = made
        yield e, result


def _filled(arg: Any, known: dict[int, torch.Tensor]) -> Any:
    """Return an argument of a recorded call with the real tensor, from ``known``, in place of each reference
    (`TensorNumber`)."""
    if type(arg) is TensorNumber:
        return known[arg.place]
    if not isinstance(arg, (list, tuple, dict)):
        return arg
    return pytree.tree_map_only(TensorNumber, lambda at: known[at.place], arg)


def tensor_of(of: Source | torch.Tensor, pools: Pools, copied: bool) -> torch.Tensor:
    """Return the real tensor of a source, or ``of`` itself if it is a tensor, detached; a copy if ``copied``."""
    tensor: torch.Tensor = of if isinstance(of, torch.Tensor) else pools[of[0]][of[1]]
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.clone() if copied else tensor


def _same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # repr treats nan as equal to itself, and distinguishes −0 from 0
