"""Regions: sets of ops of a captured step that can be split along one axis together."""

from __future__ import annotations

import math
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass
from functools import cached_property

from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs
from rematplan.runtime.split.axis_spans import AxisSpan, axes_of
from rematplan.runtime.split.rule_functions import LOSS, SUM, State
from rematplan.runtime.split.split_table import states_of

LEAST = 1 / 256
"""A region is sought around tensors of at least this share of all bytes that ops of the step allocate."""
FOLLOWED = 0.5
"""A region grows along tensors of at least this share of the bytes of the tensor where it starts."""
WIDER = 2
"""A region along the batch of a tensor of rows must save this many times more than one along the rows."""
MOST_CALLS = 64
"""A larger set of ops is not split: it is the network itself, for which smaller batches are the better tool."""


@dataclass(frozen=True, eq=False)
class SplitRegion:
    """Ops that can be split along one axis: their part of the results depends on the same part of the operands."""

    indices: int
    """The number of indices of the axis."""
    calls: tuple[str, ...]
    """The names of the ops, in the step's order, without views."""
    states: Mapping[str, State]
    """Where values have the axis, or what they are without it."""
    saved: int
    """The bytes of the tensors that only the region reads, and of which only parts exist after the split."""
    modules: tuple[str, ...]
    """The modules whose forward makes the ops, each once; ``loss`` if they compute one."""
    losses: frozenset[str] = frozenset()
    """The results that a loss is computed from, and nothing else: those of a cross entropy, and sums over parts."""

    @property
    def name(self) -> str:
        """A name for messages: `LOSS` if the region computes a loss, else the innermost module that contains all ops,
        or ``model``."""
        if LOSS in self.modules:
            return LOSS
        shared = self.modules[0].split(".") if self.modules else []
        for other in self.modules[1:]:
            parts = other.split(".")
            shared = shared[
                : next((k for k, (a, b) in enumerate(zip(shared, parts, strict=False)) if a != b), None)
            ]
            shared = shared[: len(parts)]
        return ".".join(shared) or "model"

    def is_in(self, module: str) -> bool:
        """Return whether ops of a module are in the region. ``module``: its name, or `LOSS`, or the region's name."""
        return module == self.name or any(
            one == module or one.startswith(f"{module}.") for one in self.modules
        )


class StepUse:
    """Which calls of a step make and read each value and storage."""

    def __init__(self, step: CapturedStep) -> None:
        """Index a step's calls by the values and storages that they read and make."""
        self.step = step
        self.maker, self.readers = step.makers, step.readers
        self.allocator = {s: c for c in step.calls for s in step.writes(c)}
        self.position = {c.name: at for at, c in enumerate(step.calls)}
        self.touched: dict[str, tuple[str, ...]] = {}  # values that a call reads and makes
        for call in step.calls:
            self.touched[call.name] = (*dict.fromkeys(call.operands), *call.made)
        self.outputs = step.returned()
        self.touching: dict[str, list[tuple[str, str]]] = {}
        """By storage, each value in it with the name of a call that reads or makes it."""
        for name, values in self.touched.items():
            for value in values:
                self.touching.setdefault(step.values[value].storage, []).append((value, name))

    def bytes(self, value: str) -> int:
        """Return the bytes of a value's storage."""
        return self.step.storage_bytes[self.step.values[value].storage]

    @cached_property
    def readers_of_storage(self) -> dict[str, list[tuple[str, Call]]]:
        """By storage, the calls that read it, without views, each with the value through which it does."""
        found: dict[str, list[tuple[str, Call]]] = {}
        for value, calls in self.readers.items():
            storage = self.step.values[value].storage
            found.setdefault(storage, []).extend((value, c) for c in calls if not c.is_view)
        return found

    @cached_property
    def of_weights(self) -> frozenset[str]:
        """Values from which only gradients of parameters, or statistics of them, are computed: no other output
        depends on them."""
        other = {o.value for o in self.step.outputs if o.kind not in ("gradient", "statistic")}
        for call in reversed(self.step.calls):
            if any(r in other for r in call.results):
                other.update(call.operands)
        return frozenset(self.step.values.keys() - other)

    @cached_property
    def of_losses(self) -> frozenset[str]:
        """Values from which only outputs of one number are computed, such as a loss, and no gradient."""
        found = self.step.values.keys() - {
            o.value
            for o in self.step.outputs
            if o.kind != "output" or self.step.values[o.value].fake.numel() != 1
        }
        for call in reversed(self.step.calls):
            if not found.issuperset(call.made):
                found -= set(call.operands)
        return frozenset(found)

    @cached_property
    def sums_of_weights(self) -> frozenset[str]:
        """Values of `of_weights` whose readers read nothing else that forward ops computed from the batch: gradients of
        weights, not of the tensors before them, on which other weights' gradients depend."""
        of_batch = {i.value for i in self.step.inputs if i.kind == "batch"}
        for call in self.step.calls:
            if not call.backward and not of_batch.isdisjoint(call.operands):
                of_batch.update(call.made)
        found = set(self.of_weights)
        for call in reversed(self.step.calls):
            if not (of_batch.isdisjoint(call.operands) and found.issuperset(call.made)):
                found.difference_update(call.operands)
        return frozenset(found)


def find_regions(step: CapturedStep) -> tuple[SplitRegion, ...]:
    """Return the regions of a step with large tensors, the one that saves most first. No op is in two of them."""
    use = StepUse(step)
    sizes = {s: step.storage_bytes[s] for s in use.allocator}
    least = LEAST * sum(sizes.values())
    taken: set[str] = set()
    found = []
    for storage in sorted((s for s in sizes if sizes[s] >= max(least, 1)), key=lambda s: -sizes[s]):
        maker = use.allocator[storage]
        if maker.name in taken:
            continue
        seed = next(r for r in maker.made if step.values[r].storage == storage)
        best = _best_of(use, seed, axes_of(step.values[seed].fake.shape), taken)
        other = _best_of(use, seed, _batch_axes(use, seed), taken)
        if best is None or (other is not None and other.saved >= WIDER * best.saved):
            best = other
        if best is not None:
            found.append(best.region())
            taken |= best.calls
    return tuple(sorted(found, key=lambda r: -r.saved))


def _batch_axes(use: StepUse, value: str) -> list[AxisSpan]:
    """Return the batch as an axis of a value whose first dimension has the rows of all samples together."""
    rows, *_ = (*map(int, use.step.values[value].fake.shape), 1)
    sizes = [i.fake.shape[0] for name in use.step.given("batch") if (i := use.step.values[name]).fake.ndim]
    found = (AxisSpan(0, 0, rows // int(n)) for n in sizes if 1 < n < rows and rows % int(n) == 0)
    return list(dict.fromkeys(found))


def _best_of(use: StepUse, seed: str, axes: Iterable[AxisSpan], taken: set[str]) -> _Growth | None:
    """Return the region that saves most of those that grow from a value along the axes; None if none is useful."""
    grown = [_Growth(use, seed, axis, taken) for axis in axes]
    return max((g for g in grown if g.useful), key=lambda g: (g.saved, g.indices), default=None)


class _Growth:
    """A region as it grows from one value. ``use``: the step. ``seed``: the value. ``axis``: where it has the axis.
    ``taken``: calls of other regions."""

    def __init__(self, use: StepUse, seed: str, axis: AxisSpan, taken: set[str]) -> None:
        self.use, self.step, self.taken = use, use.step, taken
        shape = self.step.values[seed].fake.shape
        self.indices = math.prod(int(n) for n in shape[axis.first : axis.last + 1]) // axis.inner
        self.states: MutableMapping[str, State] = {seed: axis}
        self.calls: set[str] = set()
        self.least = FOLLOWED * use.bytes(seed)
        self._grow([seed])
        if use.maker[seed].name in self.calls and len(self.calls) <= MOST_CALLS:
            self._settle()
            if not self._is_convex():
                self._fill()

    @property
    def useful(self) -> bool:
        """Whether the split leaves tensors of which only parts exist, and parts can run one after the other in each
        half."""
        return 0 < len(self.calls) <= MOST_CALLS and self.saved > 0 and self._is_convex()

    def _is_convex(self) -> bool:
        """Return whether no op of the region needs, through other ops, whole results of the region in the same half."""
        whole: dict[bool, set[str]] = {False: set(), True: set()}
        for call in self.step.calls:
            mine = call.name in self.calls
            read = set(call.operands)
            in_parts = {v for v in read if self.step.values[v].storage in self._made and self._has_axis(v)}
            for backward, after in whole.items():
                waits = not after.isdisjoint(read - in_parts if mine else read)
                if mine and backward == call.backward and waits:
                    return False
                if waits or (mine and backward == call.backward):
                    after.update(call.made)
        return True

    def _has_axis(self, value: str) -> bool:
        return isinstance(self.states.get(value), AxisSpan)

    def region(self) -> SplitRegion:
        """Return the region as it has grown, with the names of its forward modules; `LOSS` is among them if it computes
        losses."""
        calls = [c for c in self.step.calls if c.name in self.calls]
        modules = [c.module for c in calls if c.module and not c.backward]
        made = [r for c in calls for r in c.made]
        losses = {
            r for r in made if self.states[r] == LOSS or (self.states[r] == SUM and r in self.use.of_losses)
        }
        return SplitRegion(
            self.indices,
            tuple(c.name for c in calls),
            self.states,
            self.saved,
            tuple(dict.fromkeys([*modules, *([LOSS] if losses else [])])),
            frozenset(losses),
        )

    def _grow(self, values: Iterable[str]) -> None:
        """Follow large tensors from each value to the calls that make and read it. Add those that fit to the region
        (`calls`, `states`), until it has more than `MOST_CALLS`."""
        waiting = deque(values)
        while waiting:
            value = waiting.popleft()
            for call in self._next_to(value):
                large = call.is_view or self.use.bytes(value) >= self.least
                if call.name not in self.calls and large and (new := self._accepted(call)) is not None:
                    waiting.extend(self._add(call, new))
                    if len(self.calls) > MOST_CALLS:
                        return

    def _next_to(self, value: str) -> Iterator[Call]:
        if value in self.use.maker:
            yield self.use.maker[value]
        yield from self.use.readers.get(value, ())

    def _accepted(self, call: Call) -> dict[str, State] | None:
        """Return a call's states; None if another region has it, or its states conflict with the region's. None also if
        it splits an output, adds a value that a call of the region reads whole, or sums other than losses and gradients
        of weights."""
        if call.name in self.taken:
            return None
        found = states_of(self.step, call, self.states, self.indices)
        if found is None or any(self.states.get(v, s) != s for v, s in found.items()):
            return None
        new = (v for v in found if v not in self.states)
        if any(c.name in self.calls and c is not call for v in new for c in self._next_to(v)):
            return None  # another op reads the value whole
        whole = {v for v, s in found.items() if isinstance(s, AxisSpan)} & set(call.results)
        if not call.is_view and any(self.step.values[v].storage in self.use.outputs for v in whole):
            return None  # an output of the step exists whole anyway
        summed = {v for v, s in found.items() if s != LOSS and not isinstance(s, AxisSpan)}
        return found if summed <= self.use.sums_of_weights | self.use.of_losses else None

    def _add(self, call: Call, states: Mapping[str, State]) -> list[str]:
        """Add a call with its states to the region; views only add states. Return the values that got the axis
        newly."""
        new = [v for v, s in states.items() if v not in self.states and isinstance(s, AxisSpan)]
        self.states.update(states)
        if not call.is_view:
            self.calls.add(call.name)
        return new

    def _fill(self) -> None:
        """Add to the region the calls between two of its ops in the same half, as far as they fit."""
        for backward in (False, True):
            mine = {c.name for c in self.step.calls if c.name in self.calls and c.backward == backward}
            before, after = set[str](), set[str]()
            for call in reversed(self.step.calls):
                if call.name in mine or not before.isdisjoint(call.made):
                    before.update(call.operands)
            for call in self.step.calls:
                waits = not after.isdisjoint(call.operands)
                if call.name in mine or waits:
                    after.update(call.made)
                between = waits and not (call.is_view or call.name in mine or before.isdisjoint(call.made))
                if between and (new := self._with_views(call)) is not None:
                    self.states = {**self.states, **new}
                    self.calls.add(call.name)

    def _settle(self) -> None:
        """Add or remove the call at the region's border that lowers the bytes crossing it most, and repeat until none
        does. At more than `MOST_CALLS` calls nothing changes."""
        while True:
            best = None
            for name in self._border():
                call = self.step.call[name]
                new = {} if name in self.calls else self._with_views(call)
                if new is None or len(self.calls) > MOST_CALLS:
                    continue
                # Whether other storages cross does not change.
                values = self.step.values
                near = {values[v].storage for v in (*self.use.touched[name], *new)}
                less = self._crossing(near, self.calls, self.states) - self._crossing(
                    near, self.calls ^ {name}, ChainMap(new, self.states)
                )
                if less > 0 and (best is None or less > best[0]):
                    best = less, name, new
            if best is None:
                return
            _, name, new = best
            self.states = {**self.states, **new}
            self.calls = self.calls ^ {name}

    def _border(self) -> list[str]:
        """Return the calls of the region, and those that read its results or make its operands."""
        storages = {
            s
            for name in self.calls
            for s in (*self.step.reads(self.step.call[name]), *self.step.writes(self.step.call[name]))
        }
        found = dict.fromkeys(self.calls)
        for storage in storages:
            found |= dict.fromkeys(c.name for _, c in self.use.readers_of_storage.get(storage, ()))
            if storage in self.use.allocator:
                found[self.use.allocator[storage].name] = None
        return sorted(found, key=self.use.position.__getitem__)

    def _with_views(self, call: Call) -> dict[str, State] | None:
        """Return the new states of a call's values and of views to the region; None if the call does not fit. `states`
        is unchanged afterwards."""
        before, new = self.states, dict[str, State]()
        self.states = ChainMap(new, before)
        try:
            for value in self.use.touched[call.name]:
                self._reach(value)
            return None if (found := self._accepted(call)) is None else {**new, **found}
        finally:
            self.states = before

    def _reach(self, value: str) -> None:
        """Add to `states` that of a value and of the views from the nearest known tensor to it, as far as they fit the
        region."""
        chain = []
        while value not in self.states and value in self.use.maker and self.use.maker[value].is_view:
            chain.append(self.use.maker[value])
            value = next(refs(chain[-1].args)).value
        for call in reversed(chain):
            if (found := self._accepted(call)) is None:
                return
            self.states.update(found)

    def _is_inner(self, storage: str, calls: Set[str], states: Mapping[str, State]) -> bool:
        """Return whether one of the calls makes a storage, only they read it, in parts, and it is not returned."""
        maker, readers = self.use.allocator.get(storage), self.use.readers_of_storage.get(storage)
        if maker is None or maker.name not in calls or not readers or storage in self.use.outputs:
            return False
        return all(c.name in calls and isinstance(states.get(v), AxisSpan) for v, c in readers)

    def _crossing(self, storages: Iterable[str], calls: Set[str], states: Mapping[str, State]) -> int:
        """Return how many bytes of ``storages`` with the axis are read or made outside of a region, too. ``calls``: the
        region's."""
        return sum(
            self.step.storage_bytes[s]
            for s in storages
            if any(name in calls and isinstance(states.get(v), AxisSpan) for v, name in self.use.touching[s])
            and not self._is_inner(s, calls, states)
        )

    @cached_property
    def _made(self) -> frozenset[str]:
        return frozenset(s for name in self.calls for s in self.step.writes(self.step.call[name]))

    @cached_property
    def saved(self) -> int:
        """The bytes of the tensors of which only parts exist after the split."""
        return sum(
            self.step.storage_bytes[s] for s in self._made if self._is_inner(s, self.calls, self.states)
        )
