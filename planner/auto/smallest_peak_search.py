"""Search for the plan with the smallest peak, however much it recomputes, for all budgets that are tight.

Block strategies and a search back in time (`planner/least`) come first, then eviction, *descents* slightly
below the smallest peak, and searches clearly below. Small problems count moves, so that any process finds a
peak again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.eviction import EVICTION, lower_by_eviction
from rematplan.planner.auto.search_variants import search_variants
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, by_peak
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.search_rules import ANY_ORDER, SearchRules
from rematplan.planner.core.strategy import INTERRUPTS, Progress, silent
from rematplan.planner.least.near_least import plan_near_least
from rematplan.planner.strategies.store_all import no_recompute

Report: TypeAlias = Callable[[float, float | None], None]


@dataclass(frozen=True)
class PeakSearchOptions:
    """The constants of the search for the smallest peak, tuned by hand; no measurements were kept."""

    blocks: float = 0.3
    """After this share of the time, or `TimeShares.blocks_least` if that is more, no further block strategy begins.
    What they take beyond their share is added to the time."""
    eviction: float = 0.5
    """The share of the time for simulations of eviction, of the time left after the block strategies. They find plans
    in which recomputed tensors are evicted and recomputed again; annealing seldom does."""
    descents: float = 0.6
    """The share of the time for descents, of the time left after eviction. A descent searches for plans slightly below
    the smallest peak so far."""
    plain: float = 0.5
    """If the problem has inverses: the share of the time left that is for searching the problem without them."""
    stalls: int = 3
    """Descents end after this many in a row that do not lower the peak."""
    leaps: tuple[float, ...] = (0.03, 0.01)
    """After the descents, plans are searched within budgets that are smaller than the smallest peak so far, by each of
    these shares of it."""
    regression: float = 0.55
    """The share of the time for the search back in time (`plan_near_least`)."""
    regression_moves: int = 300_000
    """The moves that it makes for each second. It counts moves always, so its plan and its proof are the same on every
    machine. ResNet-50 takes 2 million; DenseNet-121 is given up after 1 million, which prove a bound."""
    least_regression: int = 300_000
    """The moves that it makes at least."""
    small: int = 200
    """Problems of at most this many ops, inverses included, are searched in stages of counted moves."""
    first_stage: int = 10_000
    """The number of moves of the first stage, whatever the time limit is. Each further stage has twice as many as the
    one before."""
    moves_per_second: int = 140_000
    """All stages together have at most this many moves for each second of the time limit. With 100 to 160 ops, an idle
    machine makes 100,000 to 190,000 per second in one thread."""
    stage_gain: float = 1e-4
    """A stage that lowers the peak by less than this share of it counts as one without gain."""
    stale_stages: int = 2
    """The stages end after so many in a row without gain, but not before ``fewest_moves``."""
    fewest_moves: int = 300_000
    """The stages go on without gain until they have made this many moves together, or reach the limit. With 30,000,
    small GPTs of two and three blocks ended at 1.059 and 1.060 of the proven least, with 300,000 at 1.042 and 1.036."""


PEAK_SEARCH = PeakSearchOptions()


def is_small(graph: TrainingGraph) -> bool:
    """Return whether `find_smallest_peak_in_stages` counts moves for this problem, so that its result does not depend
    on the speed of the machine."""
    return len(graph.recipes) <= PEAK_SEARCH.small


def find_smallest_peak_in_stages(
    graph: TrainingGraph,
    effort: Effort,
    starts: Sequence[Plan] = (),
    progress: Progress = silent,
    *,
    enough: int = 0,
    ended: Callable[[], bool] = lambda: False,
    rules: SearchRules = ANY_ORDER,
) -> Plan:
    """Return the plan with the smallest peak found. An interrupt is recorded in ``effort``, or raised if the plan
    without recomputation is still the best. ``enough``: a peak in bytes at which the search ends. ``ended``: returns
    whether it must end early. A small problem is searched in stages, each of twice as many moves as the one before; the
    time limit decides how many."""
    search = partial(find_smallest_peak, graph, progress=progress, enough=enough, rules=rules)
    if not is_small(graph):
        return search(effort.part(effort.left, ended), starts)
    seconds = effort.left / effort.of(1.0)
    made, moves, most = 0, PEAK_SEARCH.first_stage, int(PEAK_SEARCH.moves_per_second * seconds)
    limit = math.inf if effort.moves else seconds
    blocks, stale, least = _lean_starts(graph, Effort(), Effort(seconds), progress, enough), 0, None
    # So a search with the same starts finds the same plan, and a longer one no larger peak.
    while least is None or (
        made + moves <= most and (made < PEAK_SEARCH.fewest_moves or stale < PEAK_SEARCH.stale_stages)
    ):
        stage = Effort(limit, moves, ended=ended)
        known = starts if least is None else [*starts, least]
        found = search(stage, known, blocks=blocks)
        gained = least is None or found.peak < (1 - PEAK_SEARCH.stage_gain) * least.peak
        stale, least = 0 if gained else stale + 1, found if least is None else min(found, least, key=by_peak)
        made, moves = made + moves, 2 * moves
        if stage.interrupted:
            effort.interrupt(stage.interrupted)
        if stage.interrupted or stage.cut_short or least.peak <= max(enough, min_peak_bound(graph).bytes):
            break
    return least


def find_smallest_peak(
    graph: TrainingGraph,
    effort: Effort,
    starts: Sequence[Plan] = (),
    progress: Progress = silent,
    *,
    enough: int = 0,
    rules: SearchRules = ANY_ORDER,
    blocks: Sequence[Plan] | None = None,
) -> Plan:
    """Return the plan with the smallest peak found, no larger than that of any of ``starts`` whose order is allowed. A
    peak of at most ``enough`` bytes ends the search. An interrupt is recorded in ``effort``, or raised if the plan
    without recomputation is still the best. ``blocks``: plans of block strategies with small peaks; None: they are
    searched for."""
    rest = effort
    if blocks is None:
        before = effort.left
        seconds = max(PEAK_SEARCH.blocks * effort.total, SHARES.blocks_least)
        part = Effort() if effort.moves else Effort(seconds, ended=lambda: effort.cut_short)
        blocks = _lean_starts(graph, part, effort, progress, enough)
        if not effort.moves:
            shortest = (1 - PEAK_SEARCH.blocks) * before
            rest = Effort(max(effort.left, shortest), parent=effort)
    graph = infer_phases(graph)
    lean = min((p.estimate.peak for p in blocks), default=math.inf)
    inverses = {inverse.name for inverse in graph.inverses}

    def search(problem: TrainingGraph, share: float, carried: Sequence[Plan]) -> Plan:
        """Return the best plan of ``problem``, which has no inverses or is the whole problem, within ``share`` of the
        effort left. After an interrupt, return the best of ``carried``, plans already converted to it."""
        known = [
            p for p in (*starts, *blocks) if problem is graph or inverses.isdisjoint(runs_of(p.schedule))
        ]
        part = rest.part(share * rest.left)
        if effort.interrupted:
            return min(carried, key=by_peak)
        aim = min_peak_bound(problem).bytes
        lowering = _Lowering(problem, part, aim, enough, rules)
        return lowering.run([*known, *carried], lambda done, _: progress(done, "lowering the peak"))

    # With inverses, the problem is first searched without them, unless a start is as lean as the block plans.
    begun = any(p.estimate.peak <= lean for p in starts)
    plain = [without_inverses(graph)] if graph.inverses and not begun else []
    return search_variants((*plain, graph), PEAK_SEARCH.plain, search)[-1][1]


def _lean_starts(
    graph: TrainingGraph, for_blocks: Effort, whole: Effort, progress: Progress, enough: int
) -> tuple[Plan, ...]:
    """Return block plans with small peaks, found with the effort ``for_blocks``, and a leaner plan of the search back
    in time if it finds one. What is left of ``whole`` limits that search. It is left out if a peak is at most
    ``enough`` bytes or proven to be the least, or if ``whole`` is cut short."""
    progress(0.0, "lowering the peak")
    blocks = leanest_plans(graph, for_blocks)
    least = min((no_recompute(graph), *blocks), key=by_peak).peak
    if whole.cut_short or least <= max(enough, min_peak_bound(graph).bytes):
        return blocks
    share = PEAK_SEARCH.regression * whole.left / whole.of(1.0)
    moves = max(PEAK_SEARCH.least_regression, int(PEAK_SEARCH.regression_moves * share))
    near = plan_near_least(infer_phases(graph), least, Effort(max(share, 1.0), moves, ended=whole.ended))
    return blocks if near is None else (*blocks, near)


@dataclass
class _Lowering:
    """The search for the smallest peak of one problem, by eviction and annealing."""

    graph: TrainingGraph
    effort: Effort
    aim: int
    """Bytes that no peak is below."""
    enough: int
    """Bytes at which the search ends."""
    rules: SearchRules
    least: Plan = field(init=False)
    """The plan with the smallest peak so far."""

    def run(self, starts: Sequence[Plan], report: Report) -> Plan:
        """Return the plan with the smallest peak found, ``starts`` included unless the annealer refuses them. An
        interrupt is recorded in ``effort``; it is raised if the plan without recomputation is still the best."""
        base = no_recompute(self.graph)
        annealer = Annealer(self.graph, keep_order=self.rules.keep_order)
        known = [p for p in starts if annealer.accepts(runs_of(p.schedule))]
        self.least = min((*known, base), key=by_peak)
        try:
            self._evict()
            if not self._ended:
                self._descend([runs_of(p.schedule) for p in known], report)
            self._leap(report)
        except INTERRUPTS as interrupt:
            if self.least is base:
                raise
            self.effort.interrupt(interrupt)
        return self.least

    @property
    def _ended(self) -> bool:
        """Whether an interrupt ended a search, or the smallest peak so far is small enough or cannot be lower."""
        return self.effort.interrupted is not None or self.least.estimate.peak <= max(self.aim, self.enough)

    def _evict(self) -> None:
        """Lower the smallest peak by simulations of eviction."""
        self.least = lower_by_eviction(
            self.graph,
            self.least,
            self.aim,
            self.effort.part(PEAK_SEARCH.eviction * self.effort.left),
            first=EVICTION.next_pass,
            enough=self.enough,
            rules=self.rules,
        )

    def _descend(self, starts: Sequence[Sequence[str]], report: Report) -> None:
        """Lower the smallest peak by descents, which aim slightly below it, from its plan and from the runs of
        ``starts``."""
        least = runs_of(self.least.schedule)
        searches = [self._search(self.aim, k, report) for k in range(self._width)]
        # For the second thread: perhaps no move leads lower from the leanest plan.
        rest = [runs for runs in starts if runs != least]
        lower = [
            partial(_lower_peak, search, [least, *rest] if k == 0 else rest, self.enough)
            for k, search in enumerate(searches)
        ]
        self._in_threads(searches, lower, PEAK_SEARCH.descents)
        self._take(searches)

    def _leap(self, report: Report) -> None:
        """Lower the smallest peak by searches within budgets clearly below it. Repeat them until none lowers it, it is
        small enough, or the effort is spent."""
        gained = True
        while gained and not self._ended and not self.effort.over:
            peak, gained = self.least.estimate.peak, False
            targets = [max(self.aim, peak - max(1, int(share * peak))) for share in PEAK_SEARCH.leaps]
            # Without phases, a search has two threads itself.
            width = self._width if self.graph.has_phases else 1
            for k in range(0, len(targets), width):
                if self._ended:
                    return
                searches = [self._search(target, k, report) for target in targets[k : k + width]]
                start = [runs_of(self.least.schedule)]
                fit = [partial(_fit, search, start, self.enough) for search in searches]
                self._in_threads(searches, fit, width / (len(targets) - k))
                self._take(searches)
                gained = gained or self.least.estimate.peak < peak

    @property
    def _width(self) -> int:
        """How many searches run in parallel: 2, or 1 with one core or counted moves."""
        return 1 if self.effort.moves or (os.cpu_count() or 1) < 2 else 2

    def _search(self, budget: int, k: int, report: Report) -> Search:
        return Search(self.graph, budget, self.rules.seed + k, self.rules.keep_order, report=report)

    def _take(self, searches: Sequence[Search]) -> None:
        found = [search.smallest for search in searches if search.smallest is not None]
        self.least = min((self.least, *found), key=by_peak)

    def _in_threads(
        self, searches: Sequence[Search], methods: Sequence[Callable[[Effort], object]], share: float
    ) -> None:
        """Run ``methods``, each for the search at its position in ``searches``, in parallel, the first in this thread,
        for ``share`` of the effort left. Once a search has a peak of at most `enough` bytes, all end soon."""
        first = self.effort.part(share * self.effort.left)
        parts = [first, *(Effort(first.total, parent=first) for _ in searches[1:])]

        def run(k: int) -> None:
            parts[k].begin()
            methods[k](parts[k])
            if _peak_of(searches[k]) <= self.enough:
                for part in parts:
                    part.stop()

        with ThreadPoolExecutor(len(searches)) as pool:
            work = [pool.submit(run, k) for k in range(1, len(searches))]
            try:
                run(0)
                for other in work:
                    other.result()
            finally:
                for part in parts:
                    part.stop()


def _peak_of(search: Search) -> float:
    """Return the smallest peak that ``search`` has found, in bytes. It is infinite before the first plan."""
    return math.inf if search.smallest is None else search.smallest.estimate.peak


def _lower_peak(search: Search, starts: Sequence[Sequence[str]], enough: int, effort: Effort) -> None:
    """Lower the smallest peak of ``search`` by descents from ``starts``. End after several in a row that gain nothing,
    with a peak within the budget of ``search`` or ``enough`` bytes, or when the effort is over."""
    search.prepare(starts)
    stalls = 0
    while (
        stalls < PEAK_SEARCH.stalls
        and search.least.estimate.peak > max(search.budget, enough)
        and not effort.over
    ):
        before = search.least.estimate.peak
        search.descend(effort, effort.total, enough=enough)
        stalls = stalls + 1 if search.least.estimate.peak == before else 0


def _fit(search: Search, starts: Sequence[Sequence[str]], enough: int, effort: Effort) -> None:
    """Run ``search`` from ``starts`` until it has a plan within its budget or with a peak of at most ``enough`` bytes,
    or the effort is over."""
    search.enough = lambda overhead: math.isfinite(overhead) or _peak_of(search) <= enough
    search.run(starts, effort)
