"""The bytes resident while two lanes (CUDA streams or threads) run at any relative speed, and how far each
may run ahead within a budget.

A state (p, q) is their progress: 2k after k finished runs, 2k + 1 during run k. A copy is live from its run's
start until both lanes finished their last uses:

    bytes(p, q) = Σ size · [run has begun] · (1 − [p ≥ end on main] · [q ≥ end on recovery]) + workspaces in progress

The plan's sequence is a path of states, and waits restrict the states to a window around it. If a state off
the path exceeds the budget, the lane ahead in it must wait, which excludes all states further that way. So
the widest windows are unique. O(main runs × recovery runs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.core.array_types import Ints
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


def rows(plan: Laned) -> Iterator[Ints]:
    """Yield, for each progress q of the recovery lane, the bytes resident at each progress p of the main lane, inputs
    and workspaces included. Progress is 2k after k runs of the lane, and 2k + 1 during the next one."""
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
    """Return the progress of a lane from which on it does not use ``copy`` any more."""
    last = copy.last[lane]
    if last is None:
        last = copy.made if copy.lane == lane else BEFORE
    return 2 * last + 2


def path(where: Placed) -> Iterator[tuple[int, int]]:
    """Yield, for each progress of the recovery lane, the main lane's smallest and largest progress at that time, if
    runs follow the plan's sequence. Progress is 2k after k runs, and 2k + 1 during the next one."""
    before = (0, *where.before[RECOVERY], len(where.main))
    for j, (here, there) in enumerate(pairwise(before)):
        yield 2 * here, 2 * there
        if j < len(where.recovery):
            yield 2 * there, 2 * there


def windows(where: Placed, needs: Needs) -> Iterator[tuple[int, int]]:
    """Yield, for each progress of the recovery lane, the main lane's smallest and largest progress if the lanes wait
    as ``needs`` says. If none is possible, the smallest is larger than the largest."""
    main, most = needs[MAIN], len(where.main)
    least, k = 0, 0
    for q in range(2 * len(where.recovery) + 1):
        if q % 2:
            least = 2 * needs[RECOVERY][q // 2]
        while k < most and main[k] <= q // 2:
            k += 1
        yield least, 2 * k


def widest(plan: Laned, budget: int) -> Needs | None:
    """Return the fewest waits with which the waits of ``plan.data`` are kept and, at any relative speed, at most
    ``budget`` bytes are resident from the fork on. None if more are resident even while runs follow the plan's
    sequence."""
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
    """Return the waits that keep the main lane's progress from ``lows[q]`` to ``highs[q]`` while the recovery lane's
    progress is q: 2k after k of its runs, 2k + 1 during the next one."""
    # The limits are even numbers, between runs: bytes come when a run starts and go when one ends.
    main, j = [], 0
    for k in range(len(where.main)):
        while highs[2 * j] < 2 * k + 1:
            j += 1
        main.append(j)
    return [*main, len(where.recovery)], [lows[2 * j + 1] // 2 for j in range(len(where.recovery))]


def peak(plan: Laned, schedule: Schedule, needs: Needs) -> int:
    """Return the most bytes resident while a plan runs on two lanes with waits ``needs``, at any relative
    speed, steps before the fork included.
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
    """Return lanes read from a file with ``peak`` computed again; ProblemError if they do not fit the schedule."""
    runs = tuple(runs_of(schedule))
    plan = Laned(graph, runs, placed(lanes.fork, lanes.recovery, len(runs)))
    needs = needs_of(plan.where, lanes.waits)
    check_needs(plan.where, needs, plan.data)
    return replace(lanes, peak=peak(plan, schedule, needs))
