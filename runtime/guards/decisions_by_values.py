"""Guards on values: whether a forward would still decide as it did when it was traced.

A forward may decide by the values of its inputs, for example by whether a mask is all ones, or how many of its elements
are set. A trace is valid only for the outcomes of these decisions. Therefore the calls that compute the decisive values
from inputs and buffers are recorded. At a later call of the module they are executed again; if an outcome differs, that
call needs another graph. Values that depend on a trained parameter or on random numbers are unknown before the step
runs, so no decision may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.runtime.graph.compat import (
    DataDependentOutputException,
    FunctionalTensor,
    TorchDispatchMode,
    is_functional_tensor,
    pytree,
)
from rematplan.runtime.guards.static_shapes import STATIC
from rematplan.runtime.guards.tensor_reads import asked, plainly

Source = tuple[str, str | int]
"""Where a real tensor comes from: ``("batch", position)`` or ``("buffer", name)``."""
_Pools = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _At:
    """A reference to a tensor in the arguments of a recorded call. ``place``: the number that `OpTape` assigned to the
    tensor."""

    place: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A recorded call of a traced forward, to be executed again with real tensors. Tensors are denoted by the numbers
    that `OpTape` assigns to them.

    ``call``, ``args``, ``kwargs``: the function and its arguments, with an `_At` in place of each tensor. ``results``:
    the numbers of the resulting tensors; None for a result that is not a tensor. ``reads``: the storages that the call
    reads, each denoted by the number of the first tensor in it. ``touches``: the storages that it allocates, views or
    writes, denoted in the same way. ``expected``: the result, if the forward decided by it; else `_UNDECIDED`.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    reads: frozenset[int]
    touches: frozenset[int]
    expected: Any

    @property
    def decides(self) -> bool:
        return self.expected is not _UNDECIDED


_UNDECIDED = object()


@dataclass(frozen=True)
class ValueGuard:
    """A check that a forward would decide in the same way as when it was traced. It executes again the calls that
    compute the decisive values from the module's inputs and buffers, and compares the outcomes.

    ``entries``: the recorded calls in order, with the outcomes of the decisions.
    """

    entries: tuple[_Entry, ...] = ()
    sources: tuple[tuple[int, Source | torch.Tensor], ...] = ()
    """The tensors that exist before the first call, as pairs: the tensor's number in the recorded calls; and its
    `Source`, or the tensor itself if it is neither an input nor a buffer."""
    written: frozenset[int] = frozenset()
    """The numbers of those tensors in ``sources`` that a recorded call writes to, so that they must be copied."""

    def holds(self, buffers: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]) -> bool:
        """Return whether the forward would decide in the same way for these tensors. The recorded calls are executed
        again, and their outcomes compared with the recorded ones. The tensors are not changed.

        Args:
            buffers: the real parameters and buffers by name.
            batch: the real tensors among the arguments.
        """
        if not self.entries:
            return True
        pools: _Pools = {"batch": batch, "buffer": buffers}
        with plainly():
            known = {place: _tensor_of(of, pools, place in self.written) for place, of in self.sources}
            decided = ((e.expected, value) for e, value in _made(self.entries, known) if e.decides)
            return all(_same(expected, value) for expected, value in decided)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The values by which the forward decided, as text, in the order of the decisions."""
        return tuple(repr(e.expected) for e in self.entries if e.decides)

    def mapped(self, change: Callable[[Any], Any]) -> ValueGuard:
        """Return a copy of this guard with changed arguments of the recorded calls, to replace sizes by symbols or
        symbols by sizes.

        Args:
            change: a function from the nested arguments of a call to the new ones.
        """
        entries = (replace(e, args=change(e.args), kwargs=change(e.kwargs)) for e in self.entries)
        return replace(self, entries=tuple(entries))


def _as_given(value: Any) -> Any:
    return value


def _made(
    entries: Iterable[_Entry], known: dict[int, torch.Tensor], now: Callable[[Any], Any] = _as_given
) -> Iterator[tuple[_Entry, Any]]:
    """Execute recorded calls again and yield each with its result.

    Args:
        entries: the recorded calls, in order.
        known: real tensors by the numbers that `OpTape` assigned to them; the calls' results are added to it.
        now: a function that replaces symbolic sizes in nested arguments by integers.
    """
    for e in entries:
        args = [_filled(arg, known) for arg in now(e.args)]
        kwargs = {name: _filled(arg, known) for name, arg in now(e.kwargs).items()}
        result = e.call(*args, **kwargs)
        leaves = pytree.tree_leaves(result) if isinstance(result, (list, tuple, dict)) else (result,)
        for place, made in zip(e.results, leaves, strict=False):
            if place is not None:
                known[place] = made
        yield e, result


def _filled(arg: Any, known: dict[int, torch.Tensor]) -> Any:
    """Return an argument of a recorded call with the real tensor, from ``known``, in place of each reference
    (`_At`)."""
    if type(arg) is _At:
        return known[arg.place]
    if not isinstance(arg, (list, tuple, dict)):
        return arg
    return pytree.tree_map_only(_At, lambda at: known[at.place], arg)


def _tensor_of(of: Source | torch.Tensor, pools: _Pools, copied: bool) -> torch.Tensor:
    tensor = (of if isinstance(of, torch.Tensor) else pools[of[0]][of[1]]).detach()
    return tensor.clone() if copied else tensor


def _is_functional(tensor: torch.Tensor) -> bool:
    return bool(is_functional_tensor(tensor))


def _same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # repr treats nan as equal to itself, and distinguishes −0 from 0


class ValueGuardRecorder(TorchDispatchMode):
    """A context manager that records the decisions that a forward makes by values, such as whether a mask is all ones,
    while the forward and its backward are traced inside it. (The backward must be traced inside it, too, since it
    indexes with the same masks.)

    Args:
        buffers: the real parameters and buffers by name.
        batch: the real tensors among the arguments.

    The attribute ``now`` is a function that replaces symbolic sizes in nested arguments by those of the real tensors.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers, self.batch = buffers, batch
        self.now: Callable[[Any], Any] = _as_given
        self._tape = OpTape(self)
        self._asking = asked(lambda read, tensor: self._tape.read(read, tensor))

    def __enter__(self) -> ValueGuardRecorder:
        self._asking.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._asking.__exit__(*raised)

    def begin(self, buffers: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
        """Start the trace of a forward, and forget what was recorded before. If a forward is traced several times, the
        last trace counts.

        Args:
            buffers: the tensors of this trace that represent the parameters and buffers, by name.
            batch: the tensors of this trace that represent the inputs, by position.
        """
        self._tape = OpTape(self)
        for name, tensor in buffers.items():
            self._tape.begin(tensor, ("buffer", name))
        for at, tensor in enumerate(batch):
            self._tape.begin(tensor, ("batch", at))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        return self._tape.answer(func, args, kwargs or {})

    def guard(self) -> ValueGuard:
        """Return the guard that checks the decisions of the forward that was traced last."""
        return self._tape.guard()


class OpTape:
    """A record of a traced forward's calls whose arguments have known values: values that depend neither on a trained
    parameter nor on random numbers. It computes these values from the real tensors when the forward asks for them.

    Args:
        decisions: the recorder that has the real tensors.
    """

    def __init__(self, decisions: ValueGuardRecorder) -> None:
        self.decisions = decisions
        self.entries: list[_Entry] = []
        self.sources: dict[int, Source | torch.Tensor] = {}
        self.places: dict[int, int] = {}  # id of a traced tensor → its number
        self.alive: list[torch.Tensor] = []  # by number; ids are unique while these live
        self.memory: list[int] = []  # by number: its storage, as the number of the first tensor in it
        self.drawn: dict[int, torch.Tensor] = {}  # by id, results of `rand`; cleared by any write
        self.written: set[int] = set()  # storages that a recorded call writes to
        self.lost: set[int] = set()  # storages that unknown values were written to
        self.real: dict[int, torch.Tensor] = {}  # by number, real tensors: sources and results of entries
        self.made = 0  # the number of entries whose results are in `real`

    def begin(self, tensor: torch.Tensor, source: Source | torch.Tensor) -> None:
        """Register a tensor that exists before the first call and whose value is known, so that calls that read it are
        recorded.

        Args:
            tensor: the traced tensor.
            source: where the real tensor comes from, as ``("batch", position)`` or ``("buffer", name)``; or the real
                tensor.
        """
        self.sources[self._place(tensor, None)] = source

    def guard(self) -> ValueGuard:
        """Return a guard with all recorded decisions, and with the recorded calls and source tensors from which they
        are computed."""
        needed: set[int] = set()
        entries = []
        for entry in reversed(self.entries):
            if entry.decides or entry.touches & needed:
                needed |= entry.reads | entry.touches
                entries.append(entry)
        sources = tuple((place, of) for place, of in self.sources.items() if self.memory[place] in needed)
        written = frozenset(place for place, _ in sources if self.memory[place] in self.written)
        return ValueGuard((*reversed(entries),), sources, written)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a call of a traced forward and return its result.

        If the op returns a number to Python and its arguments' values are known, the number is computed from the real
        tensors and recorded as a decision. If the shape of the op's result depends on values, a call with a fixed shape
        is executed instead (`static_shapes.STATIC`).
        """
        if torch.Tag.data_dependent_output in func.tags and self.knows((args, kwargs)):
            return self._decided(func, args, kwargs)
        instead = STATIC.get(func)
        if instead is not None:
            return instead(self, *args, **kwargs)
        return self.run(func, *args, **kwargs)

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a call and return its result. Record the call if it draws no random numbers and the values of all its
        tensor arguments are known. Otherwise, tensors that it writes to count as unknown from then on."""
        result = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written:
            self.drawn.clear()
        if torch.Tag.nondeterministic_seeded in func.tags or not self.knows((args, kwargs)):
            self.lost |= {self.memory[self.places[id(t)]] for t in written if id(t) in self.places}
            return result
        self._note(func, args, kwargs, result, written)
        return result

    def read(self, of: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``of(*arguments)``, computed on the real tensors that the traced ones represent. The result is
        recorded as a decision, which the guard checks at later calls.

        Raises:
            DataDependentOutputException: the values of the tensors are unknown before the step runs.
        """
        if not self.knows(arguments):
            raise DataDependentOutputException(of.__name__.lstrip("_"))  # type: ignore[arg-type]
        return self._decided(of, arguments, {})

    def number(self, of: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int | None:
        """Return the integer ``of(tensor)``, computed on the real tensor that the traced one represents. It is recorded
        as a decision, which the guard checks at later calls. Return None if the values of the tensor are unknown before
        the step runs."""
        return int(self._decided(of, (tensor,), {})) if self.knows(tensor) else None

    def _decided(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = self._entry(func, args, kwargs, (), frozenset(), None)
        pools: _Pools = {"batch": self.decisions.batch, "buffer": self.decisions.buffers}
        with plainly():
            for place in self.sources.keys() - self.real.keys():
                self.real[place] = _tensor_of(self.sources[place], pools, True)
            *_, (_, value) = _made((*self.entries[self.made :], asked), self.real, self.decisions.now)
        self.entries.append(replace(asked, expected=value))
        self.made = len(self.entries)
        return value

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, written: list[torch.Tensor]) -> None:
        viewed = _viewed(func, args, kwargs)
        places = tuple(
            self._place(leaf, viewed) if isinstance(leaf, torch.Tensor) else None
            for leaf in pytree.tree_leaves(result)
        )
        touched = [*(p for p in places if p is not None), *(self.places[id(t)] for t in written)]
        memories = frozenset(self.memory[p] for p in touched)
        self.written.update(self.memory[self.places[id(t)]] for t in written)
        self.entries.append(self._entry(func, args, kwargs, places, memories, _UNDECIDED))

    def _entry(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        results: tuple[int | None, ...],
        touches: frozenset[int],
        expected: Any,
    ) -> _Entry:
        places: list[int] = []

        def at(tensor: torch.Tensor) -> _At:
            places.append(self.places[id(tensor)])
            return _At(places[-1])

        args, kwargs = pytree.tree_map_only(torch.Tensor, at, (args, kwargs))
        reads = frozenset(self.memory[p] for p in places)
        return _Entry(func, tuple(args), kwargs, results, reads, touches, expected)

    def _place(self, tensor: torch.Tensor, viewed: torch.Tensor | None) -> int:
        """Return the number of a traced tensor; a new tensor gets the next number.

        Args:
            tensor: the traced tensor.
            viewed: the tensor whose storage a new tensor shares; None if it has a new storage.
        """
        if id(tensor) not in self.places:
            self.places[id(tensor)] = place = len(self.alive)
            if isinstance(tensor, FunctionalTensor):
                self.places[id(tensor.elem)] = place  # `tolist` reads this tensor
            self.alive.append(tensor)
            self.memory.append(place if viewed is None else self.memory[self.places[id(viewed)]])
        return self.places[id(tensor)]

    def knows(self, value: Any) -> bool:
        """Return whether all tensors in nested arguments have known values: values that depend neither on a trained
        parameter nor on random numbers."""
        return all(self._is_known(t) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if id(tensor) not in self.places and type(tensor) is torch.Tensor and not _is_functional(tensor):
            self.begin(tensor, tensor)  # not traced: made from numbers, or a plain attribute
        return id(tensor) in self.places and self.memory[self.places[id(tensor)]] not in self.lost


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return those tensors among a call's arguments that the call writes to, by the op's schema."""
    if not func._schema.is_mutable:
        return []
    return _argument_of(func, args, kwargs, lambda alias: alias.is_write)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the first tensor argument whose storage a call's results may share, by the op's schema; None if there is
    none."""
    if not any(r.alias_info for r in func._schema.returns):
        return None
    return next(iter(_argument_of(func, args, kwargs, bool)), None)


def _argument_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], which: Callable[[Any], bool]
) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments whose alias annotation in the op's schema satisfies ``which``.
    Arguments without an annotation are left out."""
    by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    named = [a.name for a in func._schema.arguments if a.alias_info is not None and which(a.alias_info)]
    leaves = pytree.tree_leaves([by_name.get(name) for name in named])
    return [t for t in leaves if isinstance(t, torch.Tensor)]
