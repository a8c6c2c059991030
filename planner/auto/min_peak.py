"""The smallest peak that a step can have with recomputation unlimited (``--budget min``), and what bounds it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.restarts import Search, SearchBudget
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.warm_starts import begun_with
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, silent

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
    effort = SearchBudget(time_limit, moves)
    deadline = math.inf if moves else effort.began + BLOCKS * time_limit
    blocks = leanest_plans(infer_phases(graph), deadline)
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
    searches = [
        Search(graph, floor, seed, keep_order, report=lambda done, _: progress(done, "lowering the peak"))
        for seed in range(1 if moves or (os.cpu_count() or 1) < 2 else 2)  # moves: the same on any machine
    ]
    try:
        _descend(searches, starts, effort)
        return _cheapest(min(searches, key=_reached), effort, progress)
    except KeyboardInterrupt:
        if not (begun := [search for search in searches if search.smallest]):
            raise
        least = min(begun, key=_reached).least
        return replace(least, budget=least.estimate.peak)


def _reached(search: Search) -> int:
    return search.least.estimate.peak


def _descend(searches: Sequence[Search], starts: Sequence[Sequence[str]], effort: SearchBudget) -> None:
    """Lower the peak in each search, a thread each; all but the first do without the leanest of the starts, from where
    there may be no way down."""
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
    """Descend until nothing more is gained or the time for it is up."""
    until, stalls = DESCENDING * effort.total, 0
    while stalls < STALLS and search.least.estimate.peak > search.budget and effort.spent() < until:
        before = search.least.estimate.peak
        search.descend(effort, until)
        stalls = stalls + 1 if search.least.estimate.peak == before else 0


def _cheapest(descent: Search, effort: SearchBudget, progress: Progress) -> Plan:
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
