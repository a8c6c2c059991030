"""What two lanes hold, at whatever speed each of them runs, and how far each may be ahead.

A *state* (p, q) says how far the lanes are: p = 2k when the main lane has finished k runs and is at none, 2k + 1 while
it is at run k; q likewise on the recovery lane. What is held in a state does not depend on how the lanes came there: a
copy is there once its run has begun, until each lane has finished its last run that touches it. So

    held(p, q) = Σ bytes · [begun] · (1 − [p ≥ end on main] · [q ≥ end on recovery]) + workspaces of the runs under way.

Waits keep the lanes within windows of states around the path that the plan's own sequence takes. The largest windows
within a budget are unique: of the states that the data permits, one over the budget in which recovery is ahead of the
path can only be kept out by having recovery wait, which also shuts all states with less p and more q; one in which
main is ahead, those with more p and less q. What remains is the answer. It costs one pass over all states, a row at a
time: O(runs of main × runs of recovery) additions, linear memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.core.lanes import (
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
    """For q = 0, 1, ... the bytes held in the states (0, q), (1, q), ..., inputs and workspaces included."""
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
    held = np.full(most + 1, graph.input_bytes, dtype=np.int64)
    working = np.zeros(most + 1, dtype=np.int64)
    working[1::2] = [graph.op[runs[at]].workspace for at in where.main]
    for q in range(2 * len(where.recovery) + 1):
        for p, more in changes[q]:
            held[p:] += more
        own = graph.op[runs[where.recovery[q // 2]]].workspace if q % 2 else 0
        yield held + working + own


def _begin(copy: Copy) -> tuple[int, int]:
    at = 0 if copy.made == BEFORE else 2 * copy.made + 1
    return (at, 0) if copy.lane == MAIN else (0, at)


def _end(copy: Copy, lane: int) -> int:
    """The progress from which on a lane has no more to do with a copy."""
    last = copy.last[lane]
    if last is None:
        last = copy.made if copy.lane == lane else BEFORE
    return 2 * last + 2


def path(where: Placed) -> Iterator[tuple[int, int]]:
    """For q = 0, 1, ... the least and the largest p that the plan's own sequence goes through."""
    before = (0, *where.before[RECOVERY], len(where.main))
    for j, (here, there) in enumerate(pairwise(before)):
        yield 2 * here, 2 * there
        if j < len(where.recovery):
            yield 2 * there, 2 * there


def windows(where: Placed, needs: Needs) -> Iterator[tuple[int, int]]:
    """For q = 0, 1, ... the least and the largest p that ``needs`` allow."""
    main, most = needs[MAIN], len(where.main)
    least, k = 0, 0
    for q in range(2 * len(where.recovery) + 1):
        if q % 2:
            least = 2 * needs[RECOVERY][q // 2]
        while k < most and main[k] <= q // 2:
            k += 1
        yield least, 2 * k


def widest(plan: Laned, budget: int) -> Needs | None:
    """The least that the lanes must wait for to stay within the budget, and for their data; None if the plan's own
    sequence does not stay within it."""
    lows: list[int] = []
    highs: list[int] = []
    low = 0
    where = plan.where
    for held, (first, last), (least, most) in zip(
        rows(plan), path(where), windows(where, plan.data), strict=True
    ):
        over = held > budget
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
    """Windows as what each run waits for. Their edges are even: a run only adds to what is held, its end only frees."""
    main, j = [], 0
    for k in range(len(where.main)):
        while highs[2 * j] < 2 * k + 1:
            j += 1
        main.append(j)
    return [*main, len(where.recovery)], [lows[2 * j + 1] // 2 for j in range(len(where.recovery))]


def peak(plan: Laned, schedule: Schedule, needs: Needs) -> int:
    """The most that is held in any state that ``needs`` allow, and before the fork as the schedule has it."""
    before = resident_bytes(plan.graph, _until(schedule, plan.where.fork))
    after = (
        int(held[least : most + 1].max())
        for held, (least, most) in zip(rows(plan), windows(plan.where, needs), strict=True)
        if least <= most
    )
    return max(plan.graph.input_bytes, *before, *after)


def _until(schedule: Schedule, fork: int) -> Schedule:
    """The steps before the run of that position."""
    at = [k for k, step in enumerate(schedule) if isinstance(step, Run)]
    return schedule[: at[fork]] if fork < len(at) else schedule


def checked_lanes(graph: TrainingGraph, schedule: Schedule, lanes: Lanes) -> Lanes:
    """Lanes from elsewhere, with the peak that holds here.

    Raises:
        ProblemError: they do not fit the schedule, or do not wait for what is read.
    """
    runs = tuple(runs_of(schedule))
    plan = Laned(graph, runs, placed(lanes.fork, lanes.recovery, len(runs)))
    needs = needs_of(plan.where, lanes.waits)
    check_needs(plan.where, needs, plan.data)
    return replace(lanes, peak=peak(plan, schedule, needs))
