"""The bytes that are resident while two lanes run at any relative speed, and how far ahead each lane may run within a
budget.

The main lane and the recovery lane are two CUDA streams, or two threads on the CPU; see `lane_schedule`. A *state*
(p, q) is the progress of both: p = 2k if the main lane has finished k runs and none is in progress, p = 2k + 1 while
run k is in progress; q likewise for the recovery lane.

The resident bytes in a state do not depend on the order in which the lanes reached it. A *copy* of a tensor, the
result of one run, is live from the start of this run until both lanes have finished their last runs that use it:

    bytes(p, q) = Σ size · [run has begun] · (1 − [p ≥ end on main] · [q ≥ end on recovery]) + workspaces in progress

If the runs of both lanes follow one another in the plan's sequence, the states form a path. Waits between the lanes
restrict the states to a window around this path: for each q an interval of p. If a state exceeds the budget and
recovery is ahead of the path in it, recovery must wait. This also excludes all states with smaller p and larger q.
The same holds for the main lane. All other states are allowed, so the widest windows within a budget are unique.

Complexity: one pass over all states, row by row; O(main runs × recovery runs) additions, linear memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.core.lane_schedule import (
    BEFORE,
    MAIN,
    RECOVERY,
    Copy,
    Laned,
    Lanes,
    Needs,
    Placed,
    check_needs,
    needs_of,
    placed,
)
from rematplan.planner.core.schedule import Run, Schedule, runs_of
from rematplan.planner.core.simulator import resident_bytes

Row = NDArray[np.int64]


def rows(plan: Laned) -> Iterator[Row]:
    """Yield, for each progress q of the recovery lane, the bytes resident at each progress of the main lane: an array
    indexed by the main lane's progress p.

    A lane (a CUDA stream, or a thread on the CPU) has progress 2k if it has finished k runs and none is in progress,
    and 2k + 1 while its run k is in progress. Inputs and the workspaces of runs in progress are included.
    """
    graph, runs, where = plan.graph, plan.runs, plan.where
    most = 2 * len(where.main)
    # By progress q: pairs (p, bytes to add from progress p on).
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for copy in plan.copies:
        size, (p, q) = graph.size[copy.tensor], _begin(copy)
        changes[q].append((p, size))
        if (end := _end(copy, MAIN)) <= most:
            changes[max(q, _end(copy, RECOVERY))].append((end, -size))
    resident = np.full(most + 1, graph.input_bytes, dtype=np.int64)
    working = np.zeros(most + 1, dtype=np.int64)
    working[1::2] = [graph.op[runs[at]].workspace for at in where.main]
    for q in range(2 * len(where.recovery) + 1):
        for p, more in changes[q]:
            resident[p:] += more
        own = graph.op[runs[where.recovery[q // 2]]].workspace if q % 2 else 0
        yield resident + working + own


def _begin(copy: Copy) -> tuple[int, int]:
    at = 0 if copy.made == BEFORE else 2 * copy.made + 1
    return (at, 0) if copy.lane == MAIN else (0, at)


def _end(copy: Copy, lane: int) -> int:
    """Return the progress of a lane (a stream or thread) from which on it does not use ``copy`` any more. A copy of a
    tensor is the result of one run. The progress of a lane is 2k after k finished runs, and 2k + 1 while run k is
    in progress."""
    last = copy.last[lane]
    if last is None:
        last = copy.made if copy.lane == lane else BEFORE
    return 2 * last + 2


def path(where: Placed) -> Iterator[tuple[int, int]]:
    """Yield, for each progress q = 0, 1, ... of the recovery lane, the smallest and largest progress p of the main
    lane at that time, if the runs of both lanes are executed one after another in the plan's sequence.

    The progress of a lane (a CUDA stream, or a thread on the CPU) is 2k after k finished runs, and 2k + 1 while run k
    is in progress. ``where``: the division of the plan's runs into lanes.
    """
    before = (0, *where.before[RECOVERY], len(where.main))
    for j, (here, there) in enumerate(pairwise(before)):
        yield 2 * here, 2 * there
        if j < len(where.recovery):
            yield 2 * there, 2 * there


def windows(where: Placed, needs: Needs) -> Iterator[tuple[int, int]]:
    """Yield, for each progress q = 0, 1, ... of the recovery lane, the smallest and largest progress p that the main
    lane can have at that time, if both lanes wait as ``needs`` says. If no p is possible, the smallest is larger
    than the largest.

    The progress of a lane (a CUDA stream, or a thread on the CPU) is 2k after k finished runs, and 2k + 1 while run k
    is in progress.
    """
    main, most = needs[MAIN], len(where.main)
    least, k = 0, 0
    for q in range(2 * len(where.recovery) + 1):
        if q % 2:
            least = 2 * needs[RECOVERY][q // 2]
        while k < most and main[k] <= q // 2:
            k += 1
        yield least, 2 * k


def widest(plan: Laned, budget: int) -> Needs | None:
    """Return the fewest waits between two lanes (CUDA streams, or threads on the CPU) with which every tensor is
    written before it is read, and at most ``budget`` bytes are resident at any relative speed of the lanes.

    The result is `Needs`: for each run of a lane, how many runs of the other lane must have finished before it
    starts. It is None if the plan exceeds the budget even without concurrency, that is, if its runs are executed one
    after another in the plan's sequence.
    """
    lows: list[int] = []
    highs: list[int] = []
    low = 0
    where = plan.where
    for resident, (first, last), (least, most) in zip(
        rows(plan), path(where), windows(where, plan.data), strict=True
    ):
        over = resident > budget
        if over[first : last + 1].any():
            return None
        low = max(low, least)
        if (ahead := np.flatnonzero(over[low:first])).size:
            low += int(ahead[-1]) + 1
        late = np.flatnonzero(over[last + 1 : most + 1])
        lows.append(low)
        highs.append(last + int(late[0]) if late.size else most)
    highs = list(accumulate(reversed(highs), min))[::-1]
    return _needs(where, lows, highs)


def _needs(where: Placed, lows: Sequence[int], highs: Sequence[int]) -> Needs:
    """Convert windows of progress of two lanes (streams or threads) to `Needs`: for each run of a lane, how many runs
    of the other lane must have finished before it starts.

    The progress of a lane is 2k after k finished runs, and 2k + 1 while run k is in progress.

    ``lows``, ``highs``: for each progress q of the recovery lane, the smallest and largest progress of the main lane
    that is allowed. They are even numbers, that is, between runs: bytes are added only when a run starts and are
    freed only when one ends.
    """
    main, j = [], 0
    for k in range(len(where.main)):
        while highs[2 * j] < 2 * k + 1:
            j += 1
        main.append(j)
    return [*main, len(where.recovery)], [lows[2 * j + 1] // 2 for j in range(len(where.recovery))]


def peak(plan: Laned, schedule: Schedule, needs: Needs) -> int:
    """Return the most bytes that are resident while a plan runs on two lanes (CUDA streams, or threads on the CPU),
    at any relative speed of the lanes. The steps of ``schedule`` before the first backward op, which run on one
    lane, are included.

    ``needs``: for each run of a lane, how many runs of the other lane must have finished before it starts.
    """
    before = resident_bytes(plan.graph, _until(schedule, plan.where.fork))
    after = (
        int(resident[least : most + 1].max())
        for resident, (least, most) in zip(rows(plan), windows(plan.where, needs), strict=True)
        if least <= most
    )
    return max(plan.graph.input_bytes, *before, *after)


def _until(schedule: Schedule, fork: int) -> Schedule:
    """Return the steps of a schedule before its run number ``fork`` (from 0); the whole schedule if it has no such
    run."""
    at = [k for k, step in enumerate(schedule) if isinstance(step, Run)]
    return schedule[: at[fork]] if fork < len(at) else schedule


def checked_lanes(graph: TrainingGraph, schedule: Schedule, lanes: Lanes) -> Lanes:
    """Check that a division of a schedule into two lanes (streams or threads), read from a file, is valid. Return the
    division with ``peak`` computed again for this problem.
    """
    runs = tuple(runs_of(schedule))
    plan = Laned(graph, runs, placed(lanes.fork, lanes.recovery, len(runs)))
    needs = needs_of(plan.where, lanes.waits)
    check_needs(plan.where, needs, plan.data)
    return replace(lanes, peak=peak(plan, schedule, needs))
