"""The smallest peak of a step with unlimited recomputation (``--budget min``)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.restarts import Search, SearchBudget
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.plain_first import plain_first
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, silent

DESCENDING = 0.7  # share of the time that lowers the peak; the rest lowers the overhead at that peak
BLOCKS = 0.3  # largest share of the time for making block plans to start from
PLAIN = 0.5  # share of the time for the problem without inverses, if the problem has any
STALLS = 3  # the search for a smaller peak ends after this many descents in a row without one


def smallest_peak(
    graph: TrainingGraph,
    time_limit: float = 30.0,
    progress: Progress = silent,
    *,
    moves: int = 0,
    keep_order: bool = False,
    seed: int = 0,
    starts: Sequence[Plan] = (),
) -> Plan:
    """Return the plan with the smallest peak that is found, and with the least overhead that is found at that peak.

    The search starts from the base order, from block plans with small peaks and from ``starts``. The plan's budget is
    its peak; `min_peak_bound` is a lower bound of the peak of any schedule. A problem with inverses is first searched
    without them, unless a start has a peak no larger than that of the block plans.

    Args:
        graph: the problem.
        time_limit: seconds.
        progress: called with the fraction done and a short text.
        moves: if not 0, a number of moves that replaces the time limit. The result is then the same on every machine.
        keep_order: whether the first runs of all ops keep the base order.
        seed: of the random moves.
        starts: known plans of the problem.
    """
    compile_kernels(progress)  # before the clock starts
    effort = SearchBudget(time_limit, moves)
    deadline = math.inf if moves else effort.began + BLOCKS * time_limit
    blocks = leanest_plans(infer_phases(graph), deadline)

    def search(problem: TrainingGraph, share: float, carried: Sequence[Plan]) -> Plan:
        if problem is graph:
            sequences = [runs_of(p.schedule) for p in (*starts, *blocks, *carried)]
            return _searched(graph, sequences, effort, progress, keep_order, seed)
        inverses = {inverse.name for inverse in graph.inverses}
        known = [p for p in (*starts, *blocks) if inverses.isdisjoint(runs_of(p.schedule))]
        limit, effort.done = share * time_limit, int(share * moves)
        return smallest_peak(
            problem, limit, progress, moves=effort.done, keep_order=keep_order, seed=seed, starts=known
        )

    lean = min((p.estimate.peak for p in blocks), default=math.inf)
    begun = any(p.estimate.peak <= lean for p in starts)
    plain = [without_inverses(graph)] if graph.inverses and not begun else []
    return plain_first((*plain, graph), PLAIN, search)[-1][1]


def _searched(
    graph: TrainingGraph,
    starts: Sequence[Sequence[str]],
    effort: SearchBudget,
    progress: Progress,
    keep_order: bool,
    seed: int,
) -> Plan:
    """Lower the peak; then lower the overhead at the smallest peak. ``starts``: sequences of runs."""
    floor = min_peak_bound(graph).bytes
    report = partial(_report, progress)
    few = (
        effort.moves or (os.cpu_count() or 1) < 2
    )  # with a number of moves the result must not depend on the cores
    searches = [Search(graph, floor, seed + k, keep_order, report=report) for k in range(1 if few else 2)]
    try:
        _descend(searches, starts, effort)
        return _cheapest(min(searches, key=_reached), effort, progress, seed)
    except KeyboardInterrupt:
        if not (begun := [search for search in searches if search.smallest]):
            raise
        least = min(begun, key=_reached).least
        return replace(least, budget=least.estimate.peak)


def _report(progress: Progress, done: float, _overhead: float | None) -> None:
    progress(done, "lowering the peak")


def _reached(search: Search) -> int:
    return search.least.estimate.peak


def _descend(searches: Sequence[Search], starts: Sequence[Sequence[str]], effort: SearchBudget) -> None:
    """Lower the peak in all searches, each in its thread.

    The others do not start from the leanest start, as the first search does: from there no move may lead lower.
    """
    first, *others = searches
    first.prepare(starts)
    rest = [runs for runs in starts if runs != runs_of(first.least.schedule)]
    for search in others:
        search.prepare(rest)
    beside = replace(effort)
    with ThreadPoolExecutor(len(searches)) as pool:
        work = [pool.submit(_lower, search, beside) for search in others]
        try:
            _lower(first, effort)
            for other in work:
                other.result()
        finally:
            beside.stop()


def _lower(search: Search, effort: SearchBudget) -> None:
    """Descend until the peak no longer falls, or the share of the time for it is spent."""
    until, stalls = DESCENDING * effort.total, 0
    while stalls < STALLS and search.least.estimate.peak > search.budget and effort.spent() < until:
        before = search.least.estimate.peak
        search.descend(effort, until)
        stalls = stalls + 1 if search.least.estimate.peak == before else 0


def _cheapest(descent: Search, effort: SearchBudget, progress: Progress, seed: int) -> Plan:
    """Spend the remaining time on lowering the overhead at the smallest peak that ``descent`` found."""
    search = Search(
        descent.graph,
        descent.least.estimate.peak,
        seed,
        keep_order=descent.keep_order,
        report=lambda fraction, _: progress(fraction, "lowering the overhead at that peak"),
    )
    best = search.run([runs_of(descent.least.schedule)], effort)
    assert best is not None
    return best
