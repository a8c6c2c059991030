"""Recording the decisions of a forward that depend on values, so that a guard can check them at later calls.

Calls that compute decisive values from inputs, buffers and random numbers are recorded and executed again at a later
call. Values that depend on a trained parameter are unknown, so no decision may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import (
    DataDependentOutputException,
    FunctionalTensor,
    TorchDispatchMode,
    is_functional_tensor,
    pytree,
)
from rematplan.runtime.graph.generator_states import global_generators, set_states, states_of, states_restored
from rematplan.runtime.graph.kernel_of import kernel_of
from rematplan.runtime.guards.data_dependent_shapes import STATIC
from rematplan.runtime.guards.draws import ADVANCING, arguments_of_repeated, own_generator, repeated
from rematplan.runtime.guards.finite_tests import FiniteTests
from rematplan.runtime.guards.read_numbers import Leaf, ReadNumber
from rematplan.runtime.guards.tensor_reads import ITEM, Plainly, asked
from rematplan.runtime.guards.value_guard import (
    UNDECIDED,
    Pools,
    RecordedCall,
    Source,
    TensorNumber,
    ValueGuard,
    each_once,
    executed,
    tensor_of,
    unchanged,
)

ATEN = torch.ops.aten


class ValueGuardRecorder(TorchDispatchMode):
    """Records which decisions of a traced forward depend on values: call `begin` before each trace, and `guard`, once,
    after the last. ``buffers``, ``batch``: the real tensors. ``assumed``: known outcomes of the first tests for
    infinite and NaN values."""

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        batch: Sequence[torch.Tensor],
        assumed: tuple[bool, ...] = (),
    ) -> None:
        """Note the present states of the random number generators, from which the forward begins. Nothing is recorded
        before `begin`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers, self.batch = buffers, batch
        self.finite = FiniteTests(assumed)
        self.states = states_of(global_generators())  # of the generators, with which the forward begins
        #: Replaces symbolic sizes in nested arguments by those of the real tensors.
        self.now: Callable[[Any], Any] = unchanged
        self.counts: tuple[int, ...] | None = None
        """The numbers that the forward is expected to take as sizes, in order; each is a symbol of the trace. None if
        the trace has no symbols."""
        self._tape = OpTape(self)
        self._asking = asked(lambda read, *of: self._tape.read(read, *of), self._number)
        self.refuses_numbers = False
        """Whether a read of an unknown number is refused, even if the forward only stores or returns it."""
        self.numbers = 0  # how many such numbers were read

    def __enter__(self) -> ValueGuardRecorder:
        self._asking.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._asking.__exit__(*raised)

    def begin(
        self,
        buffers: Mapping[str, torch.Tensor],
        batch: Sequence[torch.Tensor],
        sizes: Sequence[int | torch.SymInt] = (),
    ) -> None:
        """Start the trace of a forward on the traced ``buffers`` and ``batch``, and forget what was recorded before. If
        a forward is traced several times, the last trace counts. ``sizes``: the symbols of the expected `counts`, in
        order."""
        self._tape = OpTape(self, sizes)
        for name, tensor in buffers.items():
            self._tape.begin(tensor, ("buffer", name))
        for at, tensor in enumerate(batch):
            self._tape.begin(tensor, ("batch", at))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        return self._tape.answer(func, args, kwargs or {})

    def _number(self, tensor: torch.Tensor) -> Any:
        try:
            return ITEM(tensor)
        except DataDependentOutputException:
            if self.refuses_numbers or tensor.dtype is torch.bool or tensor.is_complex():
                raise
        self.numbers += 1
        return ReadNumber(Leaf(0), (tensor.detach(),), self._tape.outcome)

    def guard(self) -> ValueGuard:
        """Return the guard of the decisions of the forward traced last. Nothing can be recorded afterwards."""
        found = replace(self._tape.guard(), assumed=tuple(self.finite.outcomes))
        self.forget()
        return found

    def forget(self) -> None:
        """Drop the tensors of the trace, which would otherwise live as long as the reference cycles that they are
        in."""
        del self._tape, self.states, self.buffers, self.batch


class OpTape:
    """A record of a trace's calls whose arguments are known: it computes their values, and makes the same draws,
    when asked."""

    def __init__(self, decisions: ValueGuardRecorder, sizes: Sequence[int | torch.SymInt] = ()) -> None:
        """Begin without calls. ``sizes``: the symbols of the expected counts (`ValueGuardRecorder.counts`), in
        order."""
        self.decisions, self.sizes = decisions, sizes
        self.entries: list[RecordedCall] = []
        self.sources: dict[int, Source | torch.Tensor] = {}
        self.places: dict[int, int] = {}  # id of a traced tensor → its number
        self.alive: list[torch.Tensor] = []  # by number; ids are unique while these live
        self.memory: list[int] = []  # by number: its storage, as the number of the first tensor in it
        self.drawn: dict[int, torch.Tensor] = {}  # by id, results of `rand`; cleared by any write
        self.written: set[int] = set()  # storages that a recorded call writes to
        self.lost: set[int] = set()  # storages that unknown values were written to
        self.chance: set[int] = set()  # storages whose values depend on random numbers
        self.blind = False  # whether the generators' states are unknown from now on
        self.states = decisions.states  # of the generators, after the last entry whose result is in `real`
        self.real: dict[int, torch.Tensor] = {}  # by number, real tensors: sources and results of entries
        self.made = 0  # the number of entries whose results are in `real`

    def begin(self, tensor: torch.Tensor, source: Source | torch.Tensor) -> None:
        """Register a tensor that exists before the first call and whose value is known, so that calls that read it are
        recorded."""
        self.sources[self._place(tensor, None)] = source

    def guard(self) -> ValueGuard:
        """Return a guard of all results by which the forward has decided, with the calls, draws and source tensors from
        which they are computed."""
        needed: set[int] = set()
        entries, drawing = [], False
        for entry in reversed(self.entries):
            # A needed number depends on all draws before it.
            if entry.decides or entry.touches & needed or (drawing and entry.draws is not None):
                needed |= entry.reads | entry.touches
                entries.append(entry)
                drawing |= entry.draws is not None
        sources = tuple((place, of) for place, of in self.sources.items() if self.memory[place] in needed)
        written = frozenset(place for place, _ in sources if self.memory[place] in self.written)
        return ValueGuard(each_once(reversed(entries), self.written), sources, written)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a call of a traced forward and return its result. If it is a number that the forward may decide by, a
        guard must find it again; `ModelError` if the forward has changed the number's buffer. Ops whose result shape
        depends on values get a fixed shape (`data_dependent_shapes.STATIC`)."""
        if torch.Tag.data_dependent_output in func.tags and self._may_decide((args, kwargs)):
            self._check_counters(args)
            return self._decided(func, args, kwargs)
        instead = STATIC.get(func)
        if instead is not None:
            return instead(self, *args, **kwargs)
        return self.run(func, *args, **kwargs)

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a call and return its result. Record the call if its arguments and the numbers that it draws are
        known; else the tensors that it writes to become unknown. A draw into unknown tensors is recorded, too, if it
        can be repeated."""
        result = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written:
            self.drawn.clear()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        known = self.knows((args, kwargs)) and not (draws and (self.blind or own_generator(args, kwargs)))
        if known:
            self._note(func, args, kwargs, result, written)
            return result
        self.lost |= {self.memory[self.places[id(t)]] for t in written if id(t) in self.places}
        if draws and not own_generator(args, kwargs):
            self._note_unknown_draw(func, args, kwargs)
        return result

    def sized(self, func: Any, plain: Any, tensor: torch.Tensor, **sizes: Any) -> Any:
        """Return ``func(tensor, **sizes)``, recorded as ``plain(tensor)``, which finds the sizes itself."""
        result = func(tensor, **sizes)
        self._note(plain, (tensor,), {}, result, [])
        return result

    def _note_unknown_draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a draw into tensors of unknown values, which advances the generator. If it cannot be repeated
        (`ADVANCING`), the generators' states are unknown from now on, and no such draw is recorded."""
        self.blind |= func.overloadpacket not in ADVANCING
        if not self.blind:
            entry = self._entry(
                repeated, arguments_of_repeated(func, args, kwargs), {}, (), frozenset(), UNDECIDED
            )
            self.entries.append(replace(entry, draws=_device(args)))

    def read(self, of: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``of(*arguments)`` for the real tensors; a guard must find the same result again.
        DataDependentOutputException if the forward may not decide by the arguments."""
        if not self._may_decide(arguments):
            raise DataDependentOutputException(of.__name__.lstrip("_"))  # type: ignore[arg-type]
        return self._decided(of, arguments, {})

    def outcome(self, of: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``of(*arguments)`` for the real tensors, recorded as a decision, also if they depend on drawn numbers.
        Raises DataDependentOutputException if the arguments are unknown."""
        if not self.knows(arguments):
            raise DataDependentOutputException(ATEN._local_scalar_dense.default)
        return self._decided(of, arguments, {})

    def count(self, of: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int | torch.SymInt | None:
        """Return ``of(tensor)`` of the real tensor for use as a size: a symbol if `counts` are expected, else a number;
        None if it is unknown or drawn. `ModelError` if another count is expected."""
        # A count of drawn numbers is another one in most calls.
        if not self.knows(tensor) or self._is_chance(tensor):
            return None
        at, expected = sum(entry.counts for entry in self.entries), self.decisions.counts
        value = int(self._decided(of, (tensor,), {}))
        if expected == ():  # none is a symbol, so it is a decision like others
            return value
        self.entries[-1] = replace(self.entries[-1], counts=True)
        if expected is None:
            return value
        if expected[at : at + 1] != (value,):
            raise ModelError("it takes other numbers of elements as sizes than in an earlier call")
        return self.sizes[at]

    def _decided(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a call on the real tensors, after the recorded calls that were not executed yet. Return its result,
        and record it as one that a guard must find again."""
        asked = self._entry(func, args, kwargs, (), frozenset(), None)
        pools: Pools = {"batch": self.decisions.batch, "buffer": self.decisions.buffers}
        with Plainly(), states_restored(self.states):
            for place in self.sources.keys() - self.real.keys():
                self.real[place] = tensor_of(self.sources[place], pools, True)
            set_states(self.states)
            *_, (_, value) = executed((*self.entries[self.made :], asked), self.real, self.decisions.now)
            self.states = states_of(self.states)
        self.entries.append(replace(asked, expected=value))
        self.made = len(self.entries)
        return value

    def _check_counters(self, args: tuple[Any, ...]) -> None:
        """Raise `ModelError` if a buffer among ``args`` was changed by the forward, which reads it as a number: each
        call would need its own graph. A truth value is allowed."""
        for tensor in pytree.tree_leaves(args):
            place = self.memory[self.places[id(tensor)]] if isinstance(tensor, torch.Tensor) else None
            source = self.sources.get(place) if place in self.written and tensor.dtype != torch.bool else None
            if isinstance(source, tuple) and source[0] == "buffer":
                raise ModelError(
                    f"the forward changes the buffer {source[1]} and reads it as a number, so each call would need a "
                    f"plan of its own; compute with the tensor (a batch norm needs a momentum other than None)"
                )

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, written: list[torch.Tensor]) -> None:
        """Record a call of known arguments with its result. ``written``: the tensors that it writes to."""
        viewed = _viewed(func, args, kwargs)
        places = tuple(
            self._place(leaf, viewed) if isinstance(leaf, torch.Tensor) else None
            for leaf in pytree.tree_leaves(result)
        )
        touched = [*(p for p in places if p is not None), *(self.places[id(t)] for t in written)]
        memories = frozenset(self.memory[p] for p in touched)
        self.written.update(self.memory[self.places[id(t)]] for t in written)
        entry = self._entry(func, args, kwargs, places, memories, UNDECIDED)
        if torch.Tag.nondeterministic_seeded in func.tags:
            entry = replace(entry, draws=_device((result, args)))
        if entry.draws is not None or entry.reads & self.chance:
            self.chance |= memories
        self.entries.append(entry)

    def _entry(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        results: tuple[int | None, ...],
        touches: frozenset[int],
        expected: Any,
    ) -> RecordedCall:
        """Return a call as a record in which known tensors are numbers. ``results``: the numbers of its results;
        ``touches``: the storages that it makes or writes."""
        places: list[int] = []

        def at(tensor: torch.Tensor) -> TensorNumber:
            places.append(self.places[id(tensor)])
            return TensorNumber(places[-1])

        args, kwargs = pytree.tree_map_only(torch.Tensor, at, (args, kwargs))
        reads = frozenset(self.memory[p] for p in places)
        return RecordedCall(kernel_of(func), tuple(args), kwargs, results, reads, touches, expected)

    def _place(self, tensor: torch.Tensor, viewed: torch.Tensor | None) -> int:
        """Return the number of a traced tensor; a new tensor gets the next number."""
        if id(tensor) not in self.places:
            self.places[id(tensor)] = place = len(self.alive)
            if isinstance(tensor, FunctionalTensor):
                self.places[id(tensor.elem)] = place  # `tolist` reads this tensor
            self.alive.append(tensor)
            self.memory.append(place if viewed is None else self.memory[self.places[id(viewed)]])
        return self.places[id(tensor)]

    def knows(self, value: Any) -> bool:
        """Return whether all tensors in nested arguments have values that depend on no trained parameter or
        unrepeatable draw."""
        return all(self._is_known(t) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))

    def _may_decide(self, value: Any) -> bool:
        """Return whether a forward may decide by nested arguments: all tensors are known, and each that depends on
        random numbers is a single truth value or integer."""
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        return self.knows(value) and not any(
            self._is_chance(t) and (t.is_floating_point() or t.is_complex() or t.numel() > 1) for t in tensors
        )

    def _is_chance(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of known values depends on random numbers."""
        return self.memory[self.places[id(tensor)]] in self.chance

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if (
            id(tensor) not in self.places
            and type(tensor) is torch.Tensor
            and not is_functional_tensor(tensor)
        ):
            self.begin(tensor, tensor)  # not traced: made from numbers, or a plain attribute
        return id(tensor) in self.places and self.memory[self.places[id(tensor)]] not in self.lost


def _device(tensors: Any) -> torch.device:
    """Return the device of the first of nested tensors, from whose generator a call draws."""
    return next(t.device for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return those tensors among a call's arguments that the call writes to, by the op's schema."""
    if not func._schema.is_mutable:
        return []
    return _argument_of(func, args, kwargs, lambda alias: alias.is_write)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the first tensor argument whose storage a call's results may share, by the op's schema, or None."""
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
