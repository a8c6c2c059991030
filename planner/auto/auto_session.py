"""The planning of one problem within one budget by the strategy ``auto``, with everything that it tries within its time
limit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.auto.block_starts import VAST, nested_plans, starting_plans
from rematplan.planner.auto.bound_thread import BoundThread
from rematplan.planner.auto.eviction import lower_by_eviction
from rematplan.planner.auto.exhaustive import MOST_STATES, exhaustive, has_few_tensors
from rematplan.planner.auto.second_annealer import SecondSearch
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak_in_stages, is_small
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.cut_bounds import Bound, min_peak_bound
from rematplan.planner.bounds.loss_cut_start import cut_start
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import CLOSED, Plan, by_cost, plan_from_runs, with_bound
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.search_rules import SearchRules
from rematplan.planner.core.strategy import INTERRUPTS, Progress
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute


class AutoSession:
    """The planning of one problem within one budget (bytes) by the strategy ``auto``. ``starts``: plans of the
    strategy's caller. ``known``: further ones; the attribute has all plans known so far. ``gap``: a plan whose overhead
    is at most this above its proven bound ends the search. ``brief``: whether this is one of many short searches,
    without block strategies."""

    def __init__(
        self,
        graph: TrainingGraph,
        budget: int,
        effort: Effort,
        rules: SearchRules,
        gap: float,
        progress: Progress,
        starts: Sequence[Plan],
        known: Sequence[Plan] = (),
        brief: bool = False,
    ) -> None:
        # No problem has more bytes than compiled loops can count, so a larger budget means the same.
        self.budget = budget = min(budget, 2**63 - 1)
        self.problem, self.effort, self.rules, self.gap = graph, effort, rules, gap
        self.progress, self.brief = progress, brief
        self.starts = starts
        self.for_blocks = without_inverses(graph)  # with the stated phases, if any
        self.graph = graph = infer_phases(graph)
        self.plain = without_inverses(graph)
        self.known: list[Plan] = []
        self.order = Annealer(graph, keep_order=True) if rules.keep_order else None
        self.bound = BoundSearch(graph, budget)
        cores = (os.cpu_count() or 1) >= SHARES.cores
        # Without phases one search has two threads.
        self.two_threads = graph.has_phases and cores and not effort.moves
        proving = SHARES.proving(self.effort) if self.brief else self.effort
        self.bound_thread = BoundThread(self.bound, proving.like(SHARES.bound if cores else 1.0), gap)
        self.take((*starts, *known))

    def find(self) -> Plan | None:
        """Return the cheapest plan within the budget that the searches of this session find, with a proven lower bound;
        None if none fits. Ctrl-C and `Enough` end the search, and are raised again if no plan fits yet."""
        with self.bound_thread:
            try:
                if not self.finished and not self.solved_exhaustively(min(MOST_STATES, self.many_states)):
                    self.gather()
                    if not self.finished and has_few_tensors(self.graph):
                        # The cheaper the best plan, the fewer states are kept.
                        self.anneal(self.graph, SHARES.before_states * self.effort.left)
                    if not self.finished and not self.solved_exhaustively(self.many_states):
                        self.search()
            except INTERRUPTS:
                if self.best is None:
                    raise
        if self.best is None:
            return None
        return with_bound(replace(self.best, budget=self.budget), self.bound.best.overhead)

    def take(self, plans: Sequence[Plan]) -> None:
        """Add plans to the known ones, and tell the search for a bound the best overhead. Plans whose order
        ``keep_order`` forbids are ignored."""
        for plan in plans:
            if plan not in self.known and (self.order is None or self.order.accepts(runs_of(plan.schedule))):
                self.known.append(plan)
        self.bound_thread.overhead = self.best_overhead

    @property
    def best(self) -> Plan | None:
        """The cheapest known plan that fits the budget; None if no known plan fits."""
        fitting = (p for p in self.known if p.estimate.peak <= self.budget)
        return min(fitting, key=by_cost, default=None)

    @property
    def smallest(self) -> Plan | None:
        """The known plan with the smallest peak, whether or not it fits the budget; None if no plan is known."""
        return min(self.known, key=lambda p: p.estimate.peak, default=None)

    @property
    def finished(self) -> bool:
        """Whether the best plan is proven within ``gap`` of the optimum, it is proven that none fits, or
        Ctrl-C ended an annealing.
        """
        interrupted = self.effort.interrupted is not None
        return interrupted or self.unreachable or self.good_enough(self.best_overhead)

    @property
    def unreachable(self) -> bool:
        """Whether it is proven that no plan fits the budget."""
        return self.bound.best.unreachable or self.budget < min_peak_bound(self.graph).bytes

    @property
    def best_overhead(self) -> float:
        """The overhead of the cheapest known plan that fits the budget; infinite if no known plan fits."""
        return math.inf if self.best is None else self.best.estimate.overhead

    def good_enough(self, overhead: float) -> bool:
        """Return whether ``overhead`` is within ``gap`` of the proven bound; if infinite, whether it is
        proven that no plan fits.
        """
        return overhead <= self.bound.best.overhead + max(CLOSED, self.gap)

    @property
    def for_block_plans(self) -> Effort:
        """What block strategies may spend: the share `TimeShares.blocks` of the whole effort, and at least
        ``blocks_least`` seconds. If a plan fits already, what was spent is subtracted. With counted moves: no limit."""
        if self.effort.moves:
            return Effort()
        spent = self.effort.spent() if self.best else 0.0
        share = min(self.effort.left, SHARES.blocks * self.effort.total - spent)
        return Effort(max(share, SHARES.blocks_least - spent, 0.0))

    def gather(self) -> None:
        """Collect plans to anneal from: a minimum cut's, then block strategies'. While no plan fits, those of
        `nested_dp`, of eviction and of the search for the smallest peak come between. With ``brief``, only a cut and
        eviction are tried. A short annealing may precede the block strategies. Ends early if `finished`, or if the
        problem has more than `VAST` ops and the cut's plan is near the bound."""
        near = self.take_cut_plan()
        if len(self.graph.ops) > VAST and near:
            return
        if self.best is None and not self.brief:
            # The annealer works better from any plan that fits, even a costly one.
            self.take(nested_plans(self.for_blocks, self.budget, self.for_block_plans, self.report))
        if self.best is None:
            self.take((self.evicted(),))
        if self.best is None and not self.brief:
            self.lower_the_peak()
        if self.finished or self.brief:
            return
        if self.two_threads and not self.graph.inverses and SHARES.few_ops <= len(self.graph.ops) <= VAST:
            self.anneal(self.graph, SHARES.first_annealing * self.effort.left, alone=True)
            if self.finished:
                return
        self.take(starting_plans(self.for_blocks, self.budget, self.for_block_plans, self.report))
        if self.graph.inverses:
            self.take(Reversible().curve(self.graph, ()))

    def evicted(self) -> Plan:
        """Simulate eviction, and return the first plan found that fits the budget. If none is found, return the plan
        with the smallest peak known."""
        leanest = self.smallest or no_recompute(self.graph)
        enough = max(self.budget, min_peak_bound(self.graph).bytes)
        effort = self.effort.part(SHARES.eviction * self.effort.total)
        return lower_by_eviction(self.graph, leanest, enough, effort, rules=self.rules)

    def lower_the_peak(self) -> None:
        """Search for the smallest peak until a plan fits or it is proven that none can, with at most the effort of the
        budget ``min``. An interrupt is raised again if no plan fits yet, else it is recorded in the effort."""
        # A budget that ``min`` can meet must not be refused.
        effort = self.effort_of_min
        if self.finished or effort.over:
            return
        self.lower_for(effort, self.budget, lambda: self.unreachable)
        if effort.interrupted:
            if self.best is None:
                raise effort.interrupted
            self.effort.interrupt(effort.interrupted)

    @property
    def effort_of_min(self) -> Effort:
        """What a search for the smallest peak may spend: as for the budget ``min``, limited to what is left
        unless the problem is small.
        """
        if is_small(self.problem):
            return self.effort.like(SHARES.smallest_peak)
        return self.effort.part(SHARES.smallest_peak * self.effort.total)

    def lower_for(self, effort: Effort, enough: int = 0, ended: Callable[[], bool] = lambda: False) -> None:
        """Search for the smallest peak and take the plan. ``effort`` records an interrupt. ``enough``: bytes at which
        the search ends. ``ended``: returns whether it must end early."""
        found = find_smallest_peak_in_stages(
            self.problem,
            effort,
            # Then it is the search of the budget ``min``, with the same peak.
            self.starts if is_small(self.problem) else self.known,
            lambda fraction, _text: self.progress(fraction, "nothing fits; lowering the peak"),
            enough=enough,
            ended=ended,
            rules=self.rules,
        )
        self.take((found,))

    def take_cut_plan(self) -> bool:
        """Add the plan of a minimum cut at the loss, if one is found. Return whether its overhead is at most
        `TimeShares.near` above the lower bound; False without a plan."""
        graph, bound = self.plain, self.bound
        if graph is not self.graph:
            bound = BoundSearch(graph, self.budget)
        if not graph.has_phases or not graph.base_cost or bound.loss_cut < 0 or self.bound.best.unreachable:
            return False
        floor = max(bound.price(bound.loss_cut) if graph is self.graph else -1.0, self.bound.best.overhead)
        effort = self.effort.part(SHARES.cut * self.effort.total)
        runs = cut_start(graph, bound.order, bound.loss_cut, self.budget, effort)
        if runs is None:
            return False
        plan = plan_from_runs(self.graph, runs, "loss_cut")
        self.take((plan,))
        return plan.estimate.overhead <= floor + SHARES.near

    @property
    def many_states(self) -> int:
        """The largest number of sets of resident tensors for trying all schedules of a small problem."""
        seconds = self.effort.total / self.effort.of(1.0)
        most = min(SHARES.states, int(SHARES.states_per_second * seconds))
        return most if self.brief else max(MOST_STATES, most)

    def solved_exhaustively(self, most_states: int) -> bool:
        """Try all schedules of a problem of few ops. Record the optimal plan if it costs less than the best known, and,
        if all ops write something, the bound that this proves. Return whether that was done: not with ``keep_order``,
        with too many tensors, or with more than ``most_states`` sets of resident tensors."""
        if self.rules.keep_order:
            return False
        below = self.graph.base_cost * (1 + self.best_overhead)
        exact = exhaustive(self.graph, self.budget, most_states, below)
        if exact is None:
            return False
        if exact.cost < math.inf:
            self.take((plan_from_runs(self.graph, exact.runs, "exhaustive"),))
        # Plans also run ops that write nothing, which the problem does not require: then this is no bound.
        if all(op.writes for op in self.graph.ops):
            self.bound.best = Bound(self.best_overhead)
        return True

    @property
    def plain_first(self) -> bool:
        """Whether the problem is annealed without its inverses first: if it has any, and the best plan is not one of
        the caller's."""
        begun = self.best is not None and self.best in self.starts
        return bool(self.graph.inverses) and not begun

    def search(self) -> None:
        """Anneal up to three variants of the problem until `finished`: without inverses, with inferred phases, and as
        given if no phases are stated. The first is skipped if there are no inverses or the best plan is one of the
        caller's. If the last annealing ends early, the search for a bound gets the effort left."""
        # Without phases, ops may be reordered.
        final = self.graph if self.problem.has_phases else self.problem
        variants = [(self.plain, SHARES.plain)] if self.plain_first else []
        if self.graph is not final:  # with inferred phases; it is searched again without them afterwards
            variants.append((self.graph, 1.0 if self.rules.keep_order else SHARES.marked))
        ended_early = False
        for graph, share in (*variants, (final, 1.0)):
            if self.finished:
                return
            ended_early = self.anneal(graph, share * self.effort.left)
        if ended_early and not self.finished:
            self.bound_thread.finish(self.effort.left)

    def anneal(self, graph: TrainingGraph, amount: float, alone: bool = False) -> bool:
        """Anneal ``graph`` for ``amount`` (seconds or moves) from the known plans of least cost and of smallest peak,
        and take the plans found. Return whether the search gave up early. An interrupt is recorded in the effort, or
        raised again if this search has no plan that fits. ``alone``: without a second thread."""

        def report(_fraction: float, overhead: float | None) -> None:
            if overhead is not None:
                self.bound_thread.overhead = min(self.bound_thread.overhead, overhead)
            self.report(_text(overhead, self.bound.best.overhead))

        seed, order = self.rules
        search = Search(graph, self.budget, seed + (2 if alone else 0), order, self.good_enough, report)
        inverses = {op.name for op in self.graph.inverses} if graph is self.plain else set()
        starts = [runs_of(p.schedule) for p in (self.best, self.smallest) if p is not None]
        usable = [runs for runs in starts if inverses.isdisjoint(runs)]
        other = Search(graph, self.budget, seed + 1, order, self.good_enough)
        search.suggest = other.suggest = lambda: self.bound.nearest
        other.suggested_to = (0,)
        try:
            effort = self.effort.part(amount)
            with nullcontext() if alone else self.second_annealing(other, usable, effort):
                search.run(usable, effort)
        finally:
            found = (search.best, search.smallest, other.best, other.smallest)
            self.take([p for p in found if p is not None])
        return search.ended_early

    def second_annealing(
        self, other: Search, starts: Sequence[Sequence[str]], effort: Effort
    ) -> AbstractContextManager[object]:
        """Return a context in which a second annealing runs in a thread. The context does nothing with too few cores,
        with counted moves or without phases."""
        if not self.two_threads or not other.graph.has_phases:
            return nullcontext()
        return SecondSearch(other, self.bound_thread, effort.left, starts)

    def report(self, text: str) -> None:
        """Call the progress callback with ``text`` and the share of the time limit that is spent."""
        self.progress(self.effort.share_spent, text)


def _text(overhead: float | None, bound: float) -> str:
    floor = "proven unreachable" if bound == math.inf else f"bound {100 * bound:.2f} %"
    if overhead is None:
        return f"nothing fits yet, {floor}"
    return f"overhead {100 * overhead:.2f} %, {floor}, gap {100 * max(0.0, overhead - bound):.2f} points"
