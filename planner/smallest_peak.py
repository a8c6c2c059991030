"""The smallest peak that a step can have with recomputation unlimited (``--budget min``), and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds import min_peak_bound
from rematplan.planner.carried import begun_with
from rematplan.planner.members import leanest_plans
from rematplan.planner.plan import Plan
from rematplan.planner.schedule import Run, runs_of
from rematplan.planner.sequence_problem import without_inverses
from rematplan.planner.sequence_search import Effort, Search
from rematplan.planner.strategy import Progress, silent
from rematplan.planner.turn import with_turn
from rematplan.planner.warm import compile_kernels

DESCENDING = 0.7  # share of the time for lowering the peak; the rest lowers the overhead at that peak
BLOCKS = 0.3  # share of the time that block plans to start from may take
PLAIN = 0.5  # share of the time for the problem without its inverses, if it has any
STALLS = 3  # descents in a row without success after which the peak is let be


def smallest_peak(
    graph: TrainingGraph,
    time_limit: float = 30.0,
    progress: Progress = silent,
    *,
    moves: int = 0,
    keep_order: bool = False,
    starts: Sequence[Sequence[str]] = (),
) -> Plan:
    """The plan of the smallest peak found, and of the least overhead found at that peak.

    It starts from the base order, block plans of little memory and ``starts``, and asks for less and less.
    `min_peak_bound` tells below what peak no schedule can be; the plan's budget is its peak. ``moves``, if not 0,
    replaces the time limit, which makes the plan the same on every machine. ``keep_order``: first runs keep the base
    order.
    """
    compile_kernels(progress)  # before the clock starts
    effort = Effort(time_limit, moves)
    deadline = math.inf if moves else effort.began + BLOCKS * time_limit
    blocks = leanest_plans(with_turn(graph), deadline)
    starts = [*starts, *(runs_of(p.schedule) for p in (*begun_with(graph), *blocks))]
    if graph.inverses and not begun_with(graph):
        inverses = {inverse.name for inverse in graph.inverses}
        known = [runs for runs in starts if inverses.isdisjoint(runs)]
        plain = smallest_peak(
            without_inverses(graph),
            PLAIN * time_limit,
            progress,
            moves=int(PLAIN * moves),
            keep_order=keep_order,
            starts=known,
        )
        starts = [*starts, runs_of(plain.schedule)]
        effort.done = int(PLAIN * moves)
    floor = min_peak_bound(graph).bytes
    search = Search(
        graph,
        floor,
        keep_order=keep_order,
        report=lambda fraction, _: progress(fraction, "lowering the peak"),
    )
    search.prepare(starts)
    until, stalls = DESCENDING * effort.total, 0
    try:
        while stalls < STALLS and search.least.estimate.peak > floor and effort.spent() < until:
            before = search.least.estimate.peak
            search.descend(effort, until)
            stalls = stalls + 1 if search.least.estimate.peak == before else 0
        return _cheapest(search, effort, progress)
    except KeyboardInterrupt:
        return replace(search.least, budget=search.least.estimate.peak)


def _cheapest(descent: Search, effort: Effort, progress: Progress) -> Plan:
    """Spend what is left on the overhead at the smallest peak that was found."""
    search = Search(
        descent.graph,
        descent.least.estimate.peak,
        keep_order=descent.keep_order,
        report=lambda fraction, _: progress(fraction, "lowering the overhead at that peak"),
    )
    best = search.run([runs_of(descent.least.schedule)], effort)
    assert best is not None
    return best


def peak_op(plan: Plan) -> str | None:
    """The op that runs where the plan's peak stands, or None if it runs nothing."""
    step = plan.schedule[plan.estimate.peak_at] if plan.estimate.peak_at >= 0 else None
    return step.op if isinstance(step, Run) else None
