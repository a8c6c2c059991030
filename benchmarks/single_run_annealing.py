"""Annealing of an op sequence by single additions, removals and rotations, on max(budget, peak) · cost: after the
description of FastSA (NeurIPS 2023), for a comparison on the same graphs. Not its authors' code.

Each sequence is priced anew, from its beginning to its end, which for graphs of a thousand ops takes some microseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.state import Floats, Ints
from rematplan.planner.core.plan import plan_from_runs

HOT, COLD = 1e-3, 1e-6
"""Temperatures, as shares of what the given order's sequence is worth; the best of those tried."""
LONGEST = 4
"""Runs a sequence may have, in ops."""
SLICES = 200


class Work(NamedTuple):
    """A problem: ``reads_at[i]:reads_at[i + 1]`` are op i's places in ``reads``; the rest by op."""

    reads_at: Ints
    reads: Ints
    size: Floats
    cost: Floats
    outputs: Ints


@numba.njit(cache=True)
def _priced(work: Work, sequence: Ints, length: int, last: Ints, end: Ints, alive: Floats) -> float:
    """Peak of a sequence; infinite if an op reads what has not been made."""
    last[:] = -1
    for at in range(length):
        op = sequence[at]
        for k in range(work.reads_at[op], work.reads_at[op + 1]):
            maker = last[work.reads[k]]
            if maker < 0:
                return np.inf
            end[maker] = at
        last[op] = end[at] = at
    for op in work.outputs:
        if last[op] < 0:
            return np.inf
        end[last[op]] = length - 1
    alive[: length + 1] = 0.0
    for at in range(length):
        alive[at] += work.size[sequence[at]]
        alive[end[at] + 1] -= work.size[sequence[at]]
    peak = now = 0.0
    for at in range(length):
        now += alive[at]
        peak = max(peak, now)
    return peak


@numba.njit(cache=True)
def _anneal(
    sequence: Ints,
    length: int,
    moves: int,
    hot: float,
    cold: float,
    work: Work,
    budget: float,
    state: Floats,
    best: Ints,
) -> int:
    """Make some moves; ``state``: cost and peak of the sequence, cost and length of the best that fits."""
    cost, ops, most = work.cost, work.cost.size, sequence.size
    last, end, alive = np.empty(ops, np.int64), np.empty(most, np.int64), np.empty(most + 1)
    tried = np.empty(most, np.int64)
    for k in range(moves):
        heat = hot * (cold / hot) ** (k / moves)
        kind, then, price = np.random.randint(3), length, state[0]
        if kind == 0:
            if length == most:
                continue
            at, op = np.random.randint(length + 1), np.random.randint(ops)
            tried[:at], tried[at] = sequence[:at], op
            tried[at + 1 : length + 1] = sequence[at:length]
            then, price = length + 1, price + cost[op]
        elif kind == 1:
            at = np.random.randint(length)
            tried[:at] = sequence[:at]
            tried[at : length - 1] = sequence[at + 1 : length]
            then, price = length - 1, price - cost[sequence[at]]
        else:
            at, to = np.random.randint(length), np.random.randint(length)
            tried[:length] = sequence[:length]
            if at < to:
                tried[at:to] = sequence[at + 1 : to + 1]
            else:
                tried[to + 1 : at + 1] = sequence[to:at]
            tried[to] = sequence[at]
        peak = _priced(work, tried, then, last, end, alive)
        if peak == np.inf:
            continue
        worse = max(budget, peak) * price - max(budget, state[1]) * state[0]
        if worse <= 0 or np.random.random() < math.exp(-worse / heat):
            sequence[:then], length = tried[:then], then
            state[0], state[1] = price, peak
            if peak <= budget and price < state[2]:
                state[2], state[3] = price, then
                best[:then] = sequence[:then]
    return length


@numba.njit(cache=True)
def _seed(seed: int) -> None:
    np.random.seed(seed)


def annealed_by_single_runs(graph: TrainingGraph, budget: int, seconds: float, seed: int = 0) -> float:
    """The overhead reached; infinite if no sequence fits. Each op of the graph writes one tensor and needs no
    workspace."""
    number = {op.writes[0]: i for i, op in enumerate(graph.ops)}
    if len(number) < len(graph.ops) or any(len(op.writes) > 1 or op.workspace for op in graph.ops):
        raise ValueError(f"{graph.name}: an op writes several tensors or needs a workspace")
    rows = [[number[t] for t in op.reads if t in number] for op in graph.ops]
    reads_at = np.cumsum([0, *map(len, rows)])
    reads = np.array([i for row in rows for i in row], dtype=np.int64)
    size = np.array([float(graph.size[op.writes[0]]) for op in graph.ops])
    cost = np.array([op.cost for op in graph.ops])
    outputs = np.array([number[t] for t in graph.outputs if t in number], dtype=np.int64)
    most = float(budget - graph.input_bytes)
    length = len(graph.ops)
    sequence, best = np.empty(LONGEST * length, np.int64), np.empty(LONGEST * length, np.int64)
    sequence[:length] = np.arange(length)
    start = plan_from_runs(graph, [op.name for op in graph.ops], "given order").estimate
    state = np.array([cost.sum(), float(start.peak - graph.input_bytes), np.inf, 0.0])
    worth = state[0] * max(most, state[1])
    rest = (Work(reads_at, reads, size, cost, outputs), most, state, best)
    _seed(seed)
    _anneal(sequence, length, 1, COLD, COLD, *rest)  # compiled before the clock starts
    began, moves, done = time.monotonic(), 100, 0.0
    while done < 1:
        then = min(1.0, done + 1 / SLICES)
        clock = time.monotonic()
        hot, cold = (worth * HOT * (COLD / HOT) ** share for share in (done, then))
        length = _anneal(sequence, length, moves, hot, cold, *rest)
        moves = max(100, int(moves * seconds / SLICES / max(1e-4, time.monotonic() - clock)))
        done = (time.monotonic() - began) / seconds
    if not math.isfinite(state[2]):
        return math.inf
    return _checked(graph, best[: int(state[3])], budget)


def _checked(graph: TrainingGraph, sequence: Sequence[int], budget: int) -> float:
    """The overhead of a sequence as the simulator sees it."""
    plan = plan_from_runs(graph, [graph.ops[i].name for i in sequence], "single runs")
    if plan.estimate.peak > budget:
        raise AssertionError(f"a peak of {plan.estimate.peak} bytes, {budget} allowed")
    return plan.estimate.overhead
