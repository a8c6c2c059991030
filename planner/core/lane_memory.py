"""The memory that two lanes hold at any relative speed, and how far ahead each lane may run.

A *state* (p, q) is the progress of both lanes: p = 2k if the main lane has finished k runs and none is in progress,
p = 2k + 1 while run k is in progress; q likewise for the recovery lane. The bytes held in a state do not depend on
how the lanes got there, because a copy is live from the start of its run until each lane has finished its last run
that uses it:

    held(p, q) = Σ bytes · [begun] · (1 − [p ≥ end on main] · [q ≥ end on recovery]) + workspaces of runs in progress.

Waits restrict the lanes to windows of states around the path of the plan's own sequence. The widest windows within
a budget are unique. A state over the budget in which recovery is ahead of the path can only be avoided by making
recovery wait, which also excludes all states with smaller p and larger q; likewise for main. The remaining states
are the answer. One pass over all states, row by row: O(main runs × recovery runs) additions, linear memory.
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
    """Yield the bytes that both lanes hold in each state of their progress: for each progress q of the recovery lane,
    an array indexed by the progress p of the main lane.

    A lane (a CUDA stream, or a thread on the CPU) has progress 2k if it has finished k runs and none is in progress,
    and 2k + 1 while its run k is in progress. Inputs and the workspaces of runs in progress are included.
    """
    graph, runs, where = plan.graph, plan.runs, plan.where
    most = 2 * len(where.main)
    changes: dict[int, list[tuple[int, int]]] = defaultdict(
        list
    )  # by q: from which p on, how many bytes more
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
    """Return the progress of a lane from which on it does not use the copy any more."""
    last = copy.last[lane]
    if last is None:
        last = copy.made if copy.lane == lane else BEFORE
    return 2 * last + 2


def path(where: Placed) -> Iterator[tuple[int, int]]:
    """Yield, for each progress q = 0, 1, ... of the recovery lane, the smallest and largest progress p of the main
    lane if the runs of both follow one another in the plan's sequence.

    Progress is 2k after k finished runs, and 2k + 1 while run k is in progress.
    """
    before = (0, *where.before[RECOVERY], len(where.main))
    for j, (here, there) in enumerate(pairwise(before)):
        yield 2 * here, 2 * there
        if j < len(where.recovery):
            yield 2 * there, 2 * there


def windows(where: Placed, needs: Needs) -> Iterator[tuple[int, int]]:
    """Yield, for each progress q = 0, 1, ... of the recovery lane, the smallest and largest progress p that the main
    lane can have meanwhile if both lanes wait as ``needs`` says. If no p is possible, the smallest is larger than
    the largest.

    Progress is 2k after k finished runs, and 2k + 1 while run k is in progress. ``needs``: for each run of a lane,
    how many runs of the other lane must have finished before it starts.
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
    """Return the fewest waits of two lanes with which data dependences hold and the lanes never hold more than
    ``budget`` bytes, at any relative speed.

    The waits are given as `Needs`: for each run of a lane, how many runs of the other lane must have finished before
    it starts. None if the plan exceeds the budget even if its runs follow one another in the plan's sequence.
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
    """Convert, for each progress q of the recovery lane, the smallest (``lows``) and largest (``highs``) progress of
    the main lane to `Needs`.

    All these numbers are even, because starting a run only adds bytes and ending one only frees them.
    """
    main, j = [], 0
    for k in range(len(where.main)):
        while highs[2 * j] < 2 * k + 1:
            j += 1
        main.append(j)
    return [*main, len(where.recovery)], [lows[2 * j + 1] // 2 for j in range(len(where.recovery))]


def peak(plan: Laned, schedule: Schedule, needs: Needs) -> int:
    """Return the most bytes that a plan on two lanes holds at any relative speed of the lanes. The steps of
    ``schedule`` before the lanes divide are included.

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
    """Return the steps before the run at position ``fork``; the whole schedule if it has no such run."""
    at = [k for k, step in enumerate(schedule) if isinstance(step, Run)]
    return schedule[: at[fork]] if fork < len(at) else schedule


def checked_lanes(graph: TrainingGraph, schedule: Schedule, lanes: Lanes) -> Lanes:
    """Check that lanes read from a file fit a schedule, and return them with ``peak`` computed anew for this problem.

    Raises:
        ProblemError: the lanes do not fit the schedule, or a run does not wait for a tensor that it reads.
    """
    runs = tuple(runs_of(schedule))
    plan = Laned(graph, runs, placed(lanes.fork, lanes.recovery, len(runs)))
    needs = needs_of(plan.where, lanes.waits)
    check_needs(plan.where, needs, plan.data)
    return replace(lanes, peak=peak(plan, schedule, needs))
