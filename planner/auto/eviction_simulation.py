"""Simulate a step that evicts tensors when memory is short and recomputes them before they are read.

As in Dynamic Tensor Rematerialization (Kirisame et al. 2021), the tensor with the best score is evicted. Here the score
has the time to the next use, and random exponents. It takes O(runs · resident tensors). Recomputed tensors may be
evicted again, which finds peaks that annealing finds late or never. A simulation fails beyond the budget or after too
many runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import compressed_rows
from rematplan.planner.arrays.precedence import needed_ops, working_sets
from rematplan.planner.auto.eviction_kernel import (
    LEFT,
    RAN,
    TINY,
    EvictionArrays,
    EvictionState,
    Policy,
    simulate,
)
from rematplan.planner.auto.passes import passes_of
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.caches.uncompiled_loops import plain
from rematplan.planner.core.array_types import Ints
from rematplan.planner.core.effort import Effort

RUNS = 8
"""A simulation fails if it executes more than this many runs per op of the problem, plus 1000."""
UNHELD = 2**60
"""The place, after all others, of tensors that may be evicted throughout."""
TINY_SHARE = 1e-3
"""A tensor is evicted last if its size is at most this share of the budget minus the inputs."""
PLACES = 32
"""The places of a step that are simulated between two looks at the effort."""
NOISE = 4096
"""How many random numbers a simulation repeats."""


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
    """The ops that every plan runs, for the simulation of eviction."""

    names: tuple[str, ...]
    """The names of the ops."""
    input_bytes: int
    """The bytes of all inputs together."""
    peaks: tuple[int, ...]
    """The bytes needed with 1, 2, ... passes if results of the backward are not evicted in their pass."""
    arrays: EvictionArrays


def tables_of(graph: TrainingGraph, passes: int = 1) -> EvictionTables:
    """Return the planning problem as tables for the simulation of eviction, computed once per graph object.

    ``passes``: at most as many as `EvictionTables.peaks`.
    """
    return cached_on(graph, f"eviction, {passes}", lambda: _build(graph, passes))


def _build(graph: TrainingGraph, passes: int) -> EvictionTables:
    """Return the tables of a problem, for at most ``passes`` passes. The results of an op that may run only once count
    as used until the last use of what the forward computes from them."""
    ops, inputs, once = needed_ops(graph), set(graph.inputs), set(graph.never_rerun)
    written = [t for op in ops for t in op.writes]
    number = {t: k for k, t in enumerate(written)}
    maker = [o for o, op in enumerate(ops) for _ in op.writes]
    outputs = set(graph.outputs)
    reads = tuple(tuple(number[t] for t in op.reads if t not in inputs) for op in ops)
    made = [k for k, t in enumerate(written) if t in outputs]
    sizes = [graph.size[t] for t in written]
    own = {op.name: bytes_ for op, bytes_ in zip(graph.ops, working_sets(graph), strict=True)}
    found = passes_of(ops, reads, [own[op.name] for op in ops], sizes, made)
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
    uses_at, used_at = compressed_rows(uses)
    return EvictionTables(
        names=tuple(op.name for op in ops),
        input_bytes=graph.input_bytes,
        peaks=tuple(graph.input_bytes + one.peak for one in found),
        arrays=EvictionArrays(
            *compressed_rows(reads),
            *compressed_rows([[number[t] for t in op.writes] for op in ops]),
            cost=np.array([op.cost for op in ops], np.float64),
            workspace=np.array([op.workspace for op in ops], np.int64),
            bytes=np.array(sizes, np.int64),
            producer=np.array(maker, np.int64),
            backward=np.array([ops[o].phase == "backward" for o in maker], np.bool_),
            once=np.array([op.name in once for op in ops], np.bool_),
            kept_from=np.array(held, np.int64),
            places=np.array(places, np.int64),
            starts=np.array(starts, np.int64),
            uses_at=uses_at,
            uses=used_at,
        ),
    )


def _needed(reads: Sequence[Sequence[int]], maker: Sequence[int], ops: set[int]) -> list[int]:
    """Return ``ops`` and all that they are computed by, ascending."""
    needed = set(ops)
    for o in range(len(reads) - 1, -1, -1):
        if o in needed:
            needed.update(maker[k] for k in reads[o])
    return sorted(needed)


class Simulation:
    """A simulation of one step within ``budget`` bytes, inputs included. ``runs`` are the ops executed, in order.

    ``compiled``: whether numba compiles the loops; plain Python does the same more slowly.
    """

    def __init__(
        self,
        tables: EvictionTables,
        budget: int,
        policy: Policy,
        source: random.Random,
        effort: Effort,
        compiled: bool = True,
    ) -> None:
        # Each executed op counts as a move of ``effort``.
        self.policy, self.effort, self.compiled = policy, effort, compiled
        self.arrays, self.state = tables.arrays, _begun(tables.arrays, budget - tables.input_bytes, source)
        if not compiled:  # lists are faster there
            self.arrays = EvictionArrays(*(array.tolist() for array in self.arrays))
            self.state = EvictionState(*(array.tolist() for array in self.state))

    @property
    def runs(self) -> list[int]:
        """The positions of the ops executed so far, in order."""
        return [int(o) for o in self.state.runs[: self.state.tally[RAN]]]

    def run(self) -> bool:
        """Simulate the step. Return False if the budget is too small, the effort over, or the runs too many.
        Call this once.
        """
        loop, tally = simulate if self.compiled else plain(simulate), self.state.tally
        end = len(self.arrays.places)
        for place in range(0, end, PLACES):
            before = int(tally[RAN])
            fits = loop(self.arrays, self.policy, self.state, place, min(end, place + PLACES))
            self.effort.charge(moves=int(tally[RAN]) - before)
            if not fits or self.effort.over:
                return fits and place + PLACES >= end
        return True


def _begun(arrays: EvictionArrays, left: int, source: random.Random) -> EvictionState:
    """Return the state before the step. ``left``: the budget without inputs, in bytes."""
    ops, tensors = arrays.workspace.size, arrays.bytes.size
    tally = np.zeros(7, np.int64)
    tally[LEFT], tally[TINY] = left, int(TINY_SHARE * max(0, left))

    def numbers(size: int, value: int = 0) -> Ints:
        return np.full(size, value, np.int64)

    return EvictionState(
        tally,
        resident=numbers(tensors),
        at=numbers(tensors, -1),
        wanted=numbers(tensors),
        next=arrays.uses_at[:-1].copy(),
        pinned=np.zeros(tensors, np.bool_),
        again=np.zeros(tensors),
        estimated=numbers(tensors, -1),
        seen=numbers(tensors),
        waiting=numbers(tensors + 1),
        spent=np.zeros(ops, np.bool_),
        stack=numbers(ops + 1),
        tries=numbers(ops + 1),
        found=numbers(tensors),
        scores=np.zeros(tensors),
        noise=np.random.default_rng(source.getrandbits(32)).standard_normal(NOISE),
        runs=numbers(RUNS * ops + 1000),
    )
