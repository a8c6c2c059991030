"""Simulate a step that evicts tensors when memory is short and recomputes them before they are read.

As in Dynamic Tensor Rematerialization (Kirisame et al. 2021), the tensor with the best score is evicted, but
by the time to its next use, and with random exponents. It takes O(runs · resident tensors). Recomputed
tensors may be evicted again, which finds peaks that annealing finds late or never. A simulation fails beyond
the budget or after too many runs.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.auto.deferral import passes_of
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.effort import Effort

RUNS = 8
"""A simulation fails if it executes more than this many runs per op of the problem, plus 1000."""
ANCESTORS = 60
"""The estimated cost of recomputing a tensor includes at most this many evicted tensors, itself included."""
UNHELD = 2**60
"""The place, after all others, of tensors that may be evicted throughout."""
TINY = 1e-3
"""A tensor is not evicted if its size is at most this share of the budget minus the inputs."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The rule for eviction: the largest score distance^a · bytes^b / (1 + cost)^c."""

    distance: float
    """a: of the ops until the next use."""
    bytes: float
    """b: of the size."""
    cost: float
    """c: of the estimated cost of recomputation."""
    wanted: float
    """A factor of the score if an unfinished recomputation reads the tensor."""
    noise: float
    """The standard deviation of a random term of the score's logarithm."""
    backward: bool
    """Whether results of the backward half may be evicted."""
    last_first: bool
    """Whether the last missing tensor is recomputed first."""
    passes: int
    """Whether outputs may be evicted and computed again in a later pass (`deferral`): 0 if not, 1 for as few passes as
    may fit, 2 for one more."""


def random_policy(source: random.Random) -> Policy:
    """Return a random policy. Small exponents of the distance are more frequent: they succeeded most often
    with DenseNets.
    """
    return Policy(
        distance=source.choice((0.0, 0.0, 0.5, 1.0)),
        bytes=source.choice((0.0, 0.5, 1.0)),
        cost=source.choice((0.0, 0.5, 1.0, 2.0)),
        wanted=10 ** source.uniform(-6, -1),
        noise=source.choice((0.0, 0.1, 0.5, 1.0)),
        backward=source.random() < 0.15,
        last_first=source.random() < 0.2,
        passes=source.choice((0, 0, 1, 2)),
    )


@dataclass(frozen=True)
class EvictionTables:
    """The ops that every plan runs, in order, and the tensors that they write, without inputs, as tables."""

    names: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    """By op: numbers of tensors, as ``writes``."""
    writes: tuple[tuple[int, ...], ...]
    cost: tuple[float, ...]
    workspace: tuple[int, ...]
    bytes: tuple[int, ...]
    producer: tuple[int, ...]
    """By tensor: the op that writes it."""
    backward: tuple[bool, ...]
    """By tensor: whether that op is of the backward half."""
    once: tuple[bool, ...]
    """By op: whether it must not run again."""
    held: tuple[int, ...]
    """By tensor: the place from which on it is not evicted: 0 for results of such ops, for outputs where their pass
    begins."""
    input_bytes: int
    """Of all inputs together."""
    peaks: tuple[int, ...]
    """The bytes needed with 1, 2, ... passes if results of the backward are not evicted in their pass."""
    places: tuple[int, ...]
    """The ops to run, in order: in each pass what its outputs need."""
    starts: tuple[int, ...]
    """The places at which passes begin, and the end."""
    uses: tuple[tuple[int, ...], ...]
    """By tensor: the places of its readers, ascending, and the end for outputs. What may not be recomputed is also
    used with what is computed from it.
    """


def tables_of(graph: TrainingGraph, passes: int = 1) -> EvictionTables:
    """Return the planning problem as tables for the simulation of eviction, computed once per graph object.

    ``passes``: at most as many as `EvictionTables.peaks`.
    """
    return cached_on(graph, f"eviction, {passes}", lambda: _build(graph, passes))


def _build(graph: TrainingGraph, passes: int) -> EvictionTables:
    """Return the tables of a problem. An op that may run only once counts its results as used until what the forward
    computes from them is used last."""
    ops, inputs, once = needed_ops(graph), set(graph.inputs), set(graph.never_rerun)
    written = [t for op in ops for t in op.writes]
    number = {t: k for k, t in enumerate(written)}
    maker = [o for o, op in enumerate(ops) for _ in op.writes]
    outputs = set(graph.outputs)
    reads = tuple(tuple(number[t] for t in op.reads if t not in inputs) for op in ops)
    made = [k for k, t in enumerate(written) if t in outputs]
    sizes = [graph.size[t] for t in written]
    found = passes_of(ops, reads, sizes, made)
    fixed = {o for o, op in enumerate(ops) if not op.writes or op.name in graph.ordered}
    places, starts, held = (
        list[int](),
        [0],
        [0 if op.name in once else UNHELD for op in ops for _ in op.writes],
    )
    for row in found[passes - 1].outputs:
        for k in row:
            held[k] = starts[-1]
        places += _needed(reads, maker, fixed | {maker[k] for k in row})
        fixed = set()
        starts.append(len(places))
    uses: list[list[int]] = [[] for _ in written]
    for place, o in enumerate(places):
        for k in reads[o]:
            uses[k].append(place)
    for k in made:
        uses[k].append(len(places))
    last = [max(row, default=-1) for row in uses]
    for o in reversed(range(len(ops))):
        if ops[o].phase != "backward":
            used = max((last[number[t]] for t in ops[o].writes), default=-1)
            for k in reads[o]:
                last[k] = max(last[k], used)
    for k, o in enumerate(maker):
        if ops[o].name in once and last[k] > max(uses[k], default=-1):
            uses[k].append(last[k])
    return EvictionTables(
        names=tuple(op.name for op in ops),
        reads=reads,
        writes=tuple(tuple(number[t] for t in op.writes) for op in ops),
        cost=tuple(op.cost for op in ops),
        workspace=tuple(op.workspace for op in ops),
        bytes=tuple(sizes),
        producer=tuple(maker),
        backward=tuple(ops[o].phase == "backward" for o in maker),
        once=tuple(op.name in once for op in ops),
        held=tuple(held),
        input_bytes=graph.input_bytes,
        peaks=tuple(graph.input_bytes + one.peak for one in found),
        places=tuple(places),
        starts=tuple(starts),
        uses=tuple(map(tuple, uses)),
    )


def _needed(reads: Sequence[Sequence[int]], maker: Sequence[int], ops: set[int]) -> list[int]:
    """Return ``ops`` and all that they are computed by, ascending."""
    needed = set(ops)
    for o in range(len(reads) - 1, -1, -1):
        if o in needed:
            needed.update(maker[k] for k in reads[o])
    return sorted(needed)


class Simulation:
    """A simulation of one step within ``budget`` bytes, inputs included. ``runs`` are the ops executed, in order."""

    def __init__(
        self,
        tables: EvictionTables,
        budget: int,
        policy: Policy,
        source: random.Random,
        effort: Effort,
    ) -> None:
        # Each executed op counts as a move of ``effort``.
        self.tables, self.policy, self.source, self.effort = tables, policy, source, effort
        self.left = budget - tables.input_bytes
        self.tiny = TINY * self.left
        self.uses = tables.uses
        self.most = RUNS * len(tables.names) + 1000
        self.now, self.passed = 0, 0
        self.costs: dict[int, float] = {}  # estimates of this place
        self.spent: set[int] = set()  # ops that may run only once, and did
        self.runs: list[int] = []
        self.resident: dict[int, None] = {}
        self.wanted: dict[int, int] = {}

    def run(self) -> bool:
        """Simulate the step. Return False if the budget is too small, the effort over, or the runs too many.
        Call this once.
        """
        return all(self._make(place, op) for place, op in enumerate(self.tables.places))

    def _make(self, place: int, op: int) -> bool:
        """Run an op after recomputing what is missing for it, unless all of its results that are used again are
        resident. Return whether that succeeded."""
        self.costs.clear()
        self.passed += place == self.tables.starts[self.passed + 1]
        self.now, reads, producer = place, self.tables.reads, self.tables.producer
        used = [t for t in self.tables.writes[op] if self._next_use(t) >= 0]
        if used and all(t in self.resident for t in used):
            for t in reads[op]:
                self._drop_unused(t)
            return True
        stack = [op]
        tries = [self._begin(op)]
        while stack:
            top = stack[-1]
            missing = [t for t in reads[top] if t not in self.resident]
            if missing:
                tries[-1] -= 1
                maker = producer[missing[-1 if self.policy.last_first else 0]]
                if not tries[-1]:
                    return False
                stack.append(maker)
                tries.append(self._begin(maker))
                continue
            if not self._execute(top):
                return False
            stack.pop()
            tries.pop()
            for t in reads[top]:
                self.wanted[t] -= 1
                if not self.wanted[t]:
                    del self.wanted[t]
                    self._drop_unused(t)
        return True

    def _begin(self, op: int) -> int:
        """Mark what ``op`` reads as wanted until it has run, and return how often these may be recomputed."""
        reads = self.tables.reads[op]
        for t in reads:
            self.wanted[t] = self.wanted.get(t, 0) + 1
        return 4 * len(reads) + 8

    def _execute(self, op: int) -> bool:
        self.effort.charge(moves=1)
        if len(self.runs) >= self.most or (len(self.runs) % 64 == 0 and self.effort.over):
            return False
        if op in self.spent:
            return False
        if self.tables.once[op]:
            self.spent.add(op)
        writes, sizes = self.tables.writes[op], self.tables.bytes
        new = [t for t in writes if t not in self.resident]
        short = sum(sizes[t] for t in new) + self.tables.workspace[op] - self.left
        if short > 0 and not self._evict(short, {*self.tables.reads[op], *writes}):
            return False
        for t in new:
            self.resident[t] = None
            self.left -= sizes[t]
        self.runs.append(op)
        for t in writes:
            if t not in self.wanted:
                self._drop_unused(t)
        return True

    def _next_use(self, tensor: int) -> int:
        """Return the number of the next op after the present one in the step that uses ``tensor``, or -1 if there is
        none."""
        uses = self.uses[tensor]
        k = bisect_right(uses, self.now)
        return uses[k] if k < len(uses) else -1

    def _drop_unused(self, tensor: int) -> None:
        if self._next_use(tensor) < 0:
            self._drop(tensor)

    def _drop(self, tensor: int) -> None:
        if tensor in self.resident:
            del self.resident[tensor]
            self.left += self.tables.bytes[tensor]

    def _evict(self, short: int, pinned: set[int]) -> bool:
        """Evict the tensors with the largest scores until ``short`` more bytes are free. Return whether there
        were enough.

        ``pinned`` ones stay, as do held ones. Tiny ones go last, the largest first.
        """
        sizes = self.tables.bytes
        large = [t for t in self.resident if sizes[t] > self.tiny and self._may_go(t, pinned)]
        for _, t in sorted(((self._score(t), t) for t in large), reverse=True):
            self._drop(t)
            short -= sizes[t]
            if short <= 0:
                return True
        rest = [t for t in self.resident if self._may_go(t, pinned)]
        for t in sorted(rest, key=lambda t: (-sizes[t], t)):
            self._drop(t)
            short -= sizes[t]
            if short <= 0:
                return True
        return False

    def _may_go(self, tensor: int, pinned: set[int]) -> bool:
        known = self.tables
        if tensor in pinned or self.now >= known.held[tensor]:
            return False
        return self.policy.backward or not known.backward[tensor] or self._returns(tensor)

    def _returns(self, tensor: int) -> bool:
        """Return whether a result of the backward is next used in a later pass."""
        later = self.tables.backward[tensor] and tensor not in self.wanted
        return later and self._next_use(tensor) >= self.tables.starts[self.passed + 1]

    def _score(self, tensor: int) -> float:
        """Return the logarithm of a tensor's score, by the eviction policy. Tensors with larger scores are evicted
        first."""
        if self._returns(tensor):
            return math.inf
        policy, use = self.policy, self._next_use(tensor)
        distance = (use if use >= 0 else 1_000_000) - self.now
        score = policy.distance * math.log(distance) + policy.bytes * math.log(self.tables.bytes[tensor])
        if policy.cost:
            if tensor not in self.costs:
                self.costs[tensor] = math.log(1.0 + self._cost(tensor))
            score -= policy.cost * self.costs[tensor]
        if tensor in self.wanted:
            score += math.log(policy.wanted)
        return score + self.source.gauss(0.0, policy.noise)

    def _cost(self, tensor: int) -> float:
        """Return the estimated cost of recomputing a tensor, with at most `ANCESTORS` missing ancestors."""
        known, seen, waiting, total = self.tables, {tensor}, [tensor], 0.0
        while waiting and len(seen) < ANCESTORS:
            op = known.producer[waiting.pop()]
            total += known.cost[op]
            for t in known.reads[op]:
                if t not in self.resident and t not in seen:
                    seen.add(t)
                    waiting.append(t)
        return total
