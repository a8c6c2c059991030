"""Plans with a small peak, by eviction: run the ops in the base order, evict tensors when memory is short, and
recompute what is read next.

Source: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021), which evicts while a step runs, the tensor of
the least h = recomputation cost / (bytes · time since its last use). Here the sequence is simulated beforehand, so the
time until the next use is known and is used instead. The exponents of h are random, because no choice is the best for
all networks, and a simulation is short: O(runs · resident tensors).

An evicted tensor is recomputed with everything that its recomputation lacks. What has been recomputed for this may be
evicted and recomputed again meanwhile; no other strategy here finds such chains in one step. So a simulation reaches
peaks that annealing reaches late or never; its overhead is large, and annealing lowers that well. Nothing is
guaranteed: a simulation fails if what must be held exceeds the budget, or after too many runs.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.caches.graph_cache import cached_on

RUNS = 8
"""A simulation fails after this many runs for each op of the problem."""
ANCESTORS = 60
"""The cost of recomputing a tensor is estimated with at most this many of its evicted ancestors."""
TINY = 1e-3
"""Tensors up to this share of the budget without inputs are not evicted."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule that says which tensor a simulation evicts first: that with the largest distance^a · bytes^b / (1 +
    cost)^c.

    ``distance``: the exponent a; distance is the number of ops until the tensor's next use. ``bytes``: the exponent
    b of the tensor's size. ``cost``: the exponent c; cost is that of recomputing the tensor. ``wanted``: a factor of
    the score of tensors that a recomputation in progress reads. ``noise``: the standard deviation of a random number
    that is added to the score's logarithm. ``backward``: whether tensors of the backward half may be evicted.
    ``last_first``: whether, of several missing reads of an op, the last is recomputed first.
    """

    distance: float
    bytes: float
    cost: float
    wanted: float
    noise: float
    backward: bool
    last_first: bool


def random_policy(source: random.Random) -> Policy:
    """Draw an eviction policy. Small exponents of the distance succeed most often in trials with DenseNets, so they
    are drawn more often."""
    return Policy(
        distance=source.choice((0.0, 0.0, 0.5, 1.0)),
        bytes=source.choice((0.0, 0.5, 1.0)),
        cost=source.choice((0.0, 0.5, 1.0, 2.0)),
        wanted=10 ** source.uniform(-6, -1),
        noise=source.choice((0.0, 0.1, 0.5, 1.0)),
        backward=source.random() < 0.15,
        last_first=source.random() < 0.2,
    )


@dataclass(frozen=True)
class Tables:
    """The ops of a problem that must run, in the problem's order, and their tensors, as integers. Inputs are left
    out.

    By op: ``names``; ``reads`` and ``writes``, tensor numbers; ``cost``; ``workspace`` in bytes; ``once``, whether
    it must not run again. By tensor: ``bytes``; ``producer``, the op that writes it; ``backward``, whether that op
    is of the backward half; ``held``, whether the tensor is never evicted, because it is an output or its producer
    must not run again; ``uses``, the ops that read it, ascending. The outputs are also used by the end of the step,
    whose number is that of ops. A tensor whose producer must not run again is also used as long as a forward tensor
    computed from it is. ``input_bytes``: of all inputs.
    """

    names: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    cost: tuple[float, ...]
    workspace: tuple[int, ...]
    bytes: tuple[int, ...]
    producer: tuple[int, ...]
    backward: tuple[bool, ...]
    once: tuple[bool, ...]
    held: tuple[bool, ...]
    input_bytes: int
    uses: tuple[tuple[int, ...], ...]


def tables_of(graph: TrainingGraph) -> Tables:
    """Return the ops and tensors of a problem as `Tables`, computed once per graph."""
    return cached_on(graph, "eviction", lambda: _build(graph))


def _build(graph: TrainingGraph) -> Tables:
    ops, inputs, once = needed_ops(graph), set(graph.inputs), set(graph.never_rerun)
    written = [t for op in ops for t in op.writes]
    number = {t: k for k, t in enumerate(written)}
    maker = [o for o, op in enumerate(ops) for _ in op.writes]
    outputs = set(graph.outputs)
    reads = tuple(tuple(number[t] for t in op.reads if t not in inputs) for op in ops)
    uses: list[list[int]] = [[] for _ in written]
    for o, row in enumerate(reads):
        for k in row:
            uses[k].append(o)
    for t in outputs - inputs:
        uses[number[t]].append(len(ops))
    last = [max(row, default=-1) for row in uses]
    for o in reversed(range(len(ops))):
        if ops[o].phase != "backward":
            used = max((last[number[t]] for t in ops[o].writes), default=-1)
            for k in reads[o]:
                last[k] = max(last[k], used)
    for k, o in enumerate(maker):
        if ops[o].name in once and last[k] > max(uses[k], default=-1):
            uses[k].append(last[k])
    return Tables(
        names=tuple(op.name for op in ops),
        reads=reads,
        writes=tuple(tuple(number[t] for t in op.writes) for op in ops),
        cost=tuple(op.cost for op in ops),
        workspace=tuple(op.workspace for op in ops),
        bytes=tuple(graph.size[t] for t in written),
        producer=tuple(maker),
        backward=tuple(ops[o].phase == "backward" for o in maker),
        once=tuple(op.name in once for op in ops),
        held=tuple(t in outputs or ops[o].name in once for t, o in zip(written, maker, strict=True)),
        input_bytes=graph.input_bytes,
        uses=tuple(map(tuple, uses)),
    )


class Simulation:
    """A simulation of one step within a budget (bytes, inputs included): ops run in the problem's order, tensors are
    evicted when memory is short, and recomputed before they are read.

    ``tables``: the problem. ``policy``: chooses the tensor to evict. ``source``: random numbers for the policy.
    ``go_on``: returns whether there is time left. ``runs``: the positions of the ops that have run so far, repeats
    included.
    """

    def __init__(
        self,
        tables: Tables,
        budget: int,
        policy: Policy,
        source: random.Random,
        go_on: Callable[[], bool],
    ) -> None:
        self.tables, self.policy, self.source, self.go_on = tables, policy, source, go_on
        self.left = budget - tables.input_bytes
        self.tiny = TINY * self.left
        self.uses = tables.uses
        self.most = RUNS * len(tables.names) + 1000
        self.now = 0
        self.runs: list[int] = []
        self.resident: dict[int, None] = {}
        self.wanted: dict[int, int] = {}

    def run(self) -> bool:
        """Simulate the step, and return whether all ops have run within the budget, the time and the limit of runs.
        To be called once."""
        return all(self._make(op) for op in range(len(self.tables.names)))

    def _make(self, op: int) -> bool:
        """Run an op, after recomputing its missing reads, and return whether everything fits."""
        self.now, reads, producer = op, self.tables.reads, self.tables.producer
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
        """Record what an op reads, and return how many recomputations of its reads are allowed until it runs."""
        reads = self.tables.reads[op]
        for t in reads:
            self.wanted[t] = self.wanted.get(t, 0) + 1
        return 4 * len(reads) + 8

    def _execute(self, op: int) -> bool:
        if len(self.runs) >= self.most or not (len(self.runs) % 64 or self.go_on()):
            return False
        if self.tables.once[op] and op != self.now:
            return False
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
        """Return the next op after the present one that uses a tensor, or -1."""
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
        """Evict tensors until ``short`` more bytes are free, and return whether that is possible. ``pinned``: not
        evicted."""
        known, policy = self.tables, self.policy
        scores = [
            (self._score(t), t)
            for t in self.resident
            if t not in pinned
            and not known.held[t]
            and known.bytes[t] > self.tiny
            and (policy.backward or not known.backward[t])
        ]
        for _, t in sorted(scores, reverse=True):
            self._drop(t)
            short -= known.bytes[t]
            if short <= 0:
                return True
        return False

    def _score(self, tensor: int) -> float:
        """Return the logarithm of how willingly a tensor is evicted."""
        policy, use = self.policy, self._next_use(tensor)
        distance = (use if use >= 0 else 1_000_000) - self.now
        score = policy.distance * math.log(distance) + policy.bytes * math.log(self.tables.bytes[tensor])
        if policy.cost:
            score -= policy.cost * math.log(1.0 + self._cost(tensor))
        if tensor in self.wanted:
            score += math.log(policy.wanted)
        return score + self.source.gauss(0.0, policy.noise)

    def _cost(self, tensor: int) -> float:
        """Return the cost of recomputing a tensor and those of its ancestors that are evicted."""
        known, seen, waiting, total = self.tables, {tensor}, [tensor], 0.0
        while waiting and len(seen) < ANCESTORS:
            op = known.producer[waiting.pop()]
            total += known.cost[op]
            for t in known.reads[op]:
                if t not in self.resident and t not in seen:
                    seen.add(t)
                    waiting.append(t)
        return total
