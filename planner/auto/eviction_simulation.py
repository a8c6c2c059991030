"""Simulate a training step that evicts tensors when memory is short: the ops run in the order without recomputation,
and evicted tensors are recomputed before they are read. The result is a plan with a small peak.

The idea is from Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021). There, while a step runs, the tensor is
evicted whose h = recomputation cost / (bytes · time since its last use) is the least. Here the step is only simulated,
so the time until the next use is known, and is used instead. The exponents in h are random: no choice is the best for
all networks, and a simulation takes little time, O(runs · resident tensors).

To recompute a tensor, everything is recomputed that this needs and that is not resident. Tensors recomputed for this
purpose may be evicted again before they are used, and recomputed once more. No other strategy here finds such chains in
one step. So a simulation finds peaks that annealing finds late or never. The overhead is large, but annealing then
lowers it well. A simulation may fail: if the tensors that cannot be evicted exceed the budget, or after too many runs.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.effort import Effort

RUNS = 8
"""A simulation fails if it executes more than this many runs per op of the problem, plus 1000."""
ANCESTORS = 60
"""The estimated cost of recomputing a tensor includes at most this many evicted tensors, itself included."""
TINY = 1e-3
"""A tensor is not evicted if its size is at most this share of the budget minus the inputs."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The parameters of the rule by which a simulation chooses the tensor to evict: that with the largest score
    distance^a · bytes^b / (1 + cost)^c.

    ``distance``: the exponent a of the number of ops until the tensor is used next. ``bytes``: the exponent b of the
    tensor's size. ``cost``: the exponent c of the estimated cost of recomputing the tensor. ``wanted``: the score of a
    tensor that an unfinished recomputation reads is multiplied by this. ``noise``: the standard deviation of a random
    number that is added to the logarithm of each score.

    ``backward``: whether tensors that the backward half writes may be evicted. ``last_first``: if several tensors that
    an op reads are not resident, whether the last of them is recomputed first.
    """

    distance: float
    bytes: float
    cost: float
    wanted: float
    noise: float
    backward: bool
    last_first: bool


def random_policy(source: random.Random) -> Policy:
    """Return random parameters for the choice of the tensor to evict. Small exponents of the distance to the next use
    are drawn more often, because they succeeded most often in trials with DenseNets."""
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
    """The planning problem as tables for the simulation of eviction. It contains the ops that every plan runs, numbered
    in the problem's order, and the tensors that they write. Inputs are left out.

    By op: ``names``. ``reads``, ``writes``: numbers of tensors. ``cost``. ``workspace``: bytes. ``once``: whether the
    op must not run again.

    By tensor: ``bytes``. ``producer``: the op that writes it. ``backward``: whether that op belongs to the backward
    half. ``held``: whether the tensor is never evicted, because it is an output or its producer must not run again.
    ``uses``: the ops that use it, ascending; a tensor is freed after its last use.

    ``uses`` has the ops that read the tensor. For an output it also has the number of ops, which is the end of the
    step. For a tensor whose producer must not run again, it also has the last use of any forward tensor computed from
    it. ``input_bytes``: the bytes of all inputs together.
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
    """Return the planning problem as tables for the simulation of eviction. They are computed once per graph object."""
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
    """A simulation of one training step within a budget (bytes, inputs included). Ops run in the problem's order,
    tensors are evicted when memory is short, and evicted tensors are recomputed before they are read.

    ``tables``: the problem. ``policy``: the rule that chooses the tensor to evict. ``source``: the random numbers that
    the rule uses. ``effort``: what may be spent; each executed op counts as a move. ``runs``: the result: the numbers
    of the ops executed so far, in order, repetitions included.
    """

    def __init__(
        self,
        tables: Tables,
        budget: int,
        policy: Policy,
        source: random.Random,
        effort: Effort,
    ) -> None:
        self.tables, self.policy, self.source, self.effort = tables, policy, source, effort
        self.left = budget - tables.input_bytes
        self.tiny = TINY * self.left
        self.uses = tables.uses
        self.most = RUNS * len(tables.names) + 1000
        self.now = 0
        self.runs: list[int] = []
        self.resident: dict[int, None] = {}
        self.wanted: dict[int, int] = {}

    def run(self) -> bool:
        """Simulate the step. Return True if all ops ran; False if the budget was too small, the time was up, or too
        many ops were executed. Call this only once per simulation."""
        return all(self._make(op) for op in range(len(self.tables.names)))

    def _make(self, op: int) -> bool:
        """Execute an op of the step, after recomputing the tensors that it reads and that are not resident. Return
        whether this succeeded within the budget and the limits."""
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
        """Mark the tensors that ``op`` reads as wanted, which lowers their scores for eviction until the op has run.
        Return the limit for how often the simulation may recompute one of these tensors before the op runs."""
        reads = self.tables.reads[op]
        for t in reads:
            self.wanted[t] = self.wanted.get(t, 0) + 1
        return 4 * len(reads) + 8

    def _execute(self, op: int) -> bool:
        self.effort.charge(moves=1)
        if len(self.runs) >= self.most or (len(self.runs) % 64 == 0 and self.effort.over):
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
        """Evict the tensors with the largest scores until ``short`` more bytes are free. Return whether enough could be
        evicted.

        Tensors in ``pinned`` are not evicted, nor are very small ones, those that `Tables.held` marks, and (unless the
        policy allows it) those that the backward half writes.
        """
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
        """Return the logarithm of a tensor's score, by the eviction policy. Tensors with larger scores are evicted
        first."""
        policy, use = self.policy, self._next_use(tensor)
        distance = (use if use >= 0 else 1_000_000) - self.now
        score = policy.distance * math.log(distance) + policy.bytes * math.log(self.tables.bytes[tensor])
        if policy.cost:
            score -= policy.cost * math.log(1.0 + self._cost(tensor))
        if tensor in self.wanted:
            score += math.log(policy.wanted)
        return score + self.source.gauss(0.0, policy.noise)

    def _cost(self, tensor: int) -> float:
        """Return the estimated cost of recomputing a tensor: the costs of its producer and of the producers of its
        ancestors that are not resident. At most `ANCESTORS` tensors are counted."""
        known, seen, waiting, total = self.tables, {tensor}, [tensor], 0.0
        while waiting and len(seen) < ANCESTORS:
            op = known.producer[waiting.pop()]
            total += known.cost[op]
            for t in known.reads[op]:
                if t not in self.resident and t not in seen:
                    seen.add(t)
                    waiting.append(t)
        return total
