"""The strategy ``auto``: the best plan that any of the methods here finds, with a proven lower bound."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.ir.errors import Known
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.cheap_plan import cheap_plan
from rematplan.planner.annealing.restarts import Search
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.auto.block_starts import VAST, nested_plans, starting_plans
from rematplan.planner.auto.bound_thread import Proof
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.eviction import lower_by_eviction
from rematplan.planner.auto.second_annealer import SecondSearch
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.auto.without_inverses_first import search_without_inverses_first
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.cut_bounds import CLOSED, Bound, min_peak_bound
from rematplan.planner.bounds.loss_cut_start import cut_start
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, Strategy, pareto, silent
from rematplan.planner.ilp.exhaustive import exhaustive
from rematplan.planner.strategies.anneal import CHEAP_SHARE
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute

CUT = 0.3  # the plan from the loss cut must be found within this share of the time
MEMBERS = 0.4  # share of the time that the block strategies may take
MEMBERS_LEAST = 1.0  # seconds that they may take at least, however short the time is; see `members_until`
MARKED = 0.6  # share of the time for a problem with inferred phases; the rest is for it without them
PLAIN = 0.4  # share of the search's time for the problem without its inverses
LEAST = 0.5
"""Share of the time for finding the smallest peak, for the budget ``min`` and for refusals."""
ROUND, GAIN = 2.0, 0.01
"""Once a budget is proven to be too small, the smallest peak is searched for in rounds. The first takes so many
seconds, each further one twice as long, until a round lowers the peak by less than this share."""
CHEAPLY = 2.0
"""Seconds for the second plan that a refusal names at most; see `CHEAP_SHARE`."""
EVICTION = 0.1  # share of the time for eviction, if nothing fits
CORES = 2  # with so many, a second annealing runs after the search for the bound
PROVING = 0.75  # share of the time for the bound, if a second annealing uses the core afterwards
FIRST = 0.3  # share of the time for a first annealing, which may make the block strategies needless
SMALL = 200  # with fewer ops, the block strategies take almost no time, and run first
NEAR = 0.005
"""In a vast problem, a plan from the loss cut with an overhead this near to the bound makes block plans
unnecessary.
"""


@dataclass(frozen=True)
class Auto(Strategy):
    """Combine all strategies under one time limit. The plan is never worse than that of a strategy that was run.

    A plan carries the name of the strategy that found it. The steps are:

    - Problems of a few ops are solved exhaustively.
    - Block strategies make start plans, in at most two fifths of the time (but at least a second). Up to 3000 ops all
      of them are run (``exact_dp`` finds all plans of ``approx_dp``); above, where they would take longer than the
      annealing, only a thinned ``approx_dp``. While nothing fits, ``nested_dp`` is run first, for peaks near the
      budget.
    - The solution of the linear program with one cut at the loss makes another start plan.
    - The annealer improves the best of these plans.
    - At the same time a thread searches for a lower bound, whose solutions the annealer takes as further starts. With
      two cores or more it gets three quarters of the time, and a second annealing gets the rest. Then problems of 200
      to 3000 ops without inverses begin with a short annealing, since block strategies compete with the search for
      the bound.

    The search ends when the gap is closed, when nothing has improved for long, or when the time is up. Ctrl-C ends it
    with the best plan so far.

    A problem without phases that looks like a training step (`infer_phases`) is searched as one first, then with
    reordering. If stated phases contradict the graph, block plans are made with the stated phases and with inferred
    ones; everything else uses the inferred ones. A problem with inverses is searched without them first, unless the
    best known plan is a given start.

    Options: ``time_limit``: seconds, from the start of planning, block strategies included. ``seed``, ``keep_order``:
    as for `Anneal`. ``reuse``: plans are worth keeping on disk, so the owner of a `PlanStore` starts later processes
    from them; a plan for a smaller budget serves a larger one. ``gap``: end the search when the plan's overhead is
    proven to be above the optimum's by no more than this (0.001: a tenth of a percent of the step's time).
    """

    time_limit: float = 30.0
    seed: int = 0
    keep_order: bool = False
    reuse: bool = True
    gap: float = 0.0

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the best of all strategies, annealed further, with a proven bound"

    resumes: ClassVar[bool] = True

    @property
    def lasting(self) -> bool:
        """Whether the plans are worth keeping on disk: the option ``reuse``."""
        return self.reuse

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the best plan found within ``budget`` bytes, with a proven lower bound of the overhead.

        The plan is never worse than a start that fits (and keeps the order, if ``keep_order`` is set).

        Raises:
            InfeasibleBudget: no plan was found that fits. The error has the smallest peak found.
            KeyboardInterrupt: before any plan was found that fits. Later it ends the search with the best plan so far.
        """
        compile_kernels(progress)
        return _Session(self, graph, budget, progress, starts).plan()

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return the plans found, by falling peak and rising overhead, none dominated by another.

        Budgets (bytes) are planned from the largest to the smallest, each with all plans found before as starts. No
        smaller budget is planned after one that no plan fits. The time limit holds for the whole curve.
        """
        steps = sorted(set(budgets), reverse=True)
        found: list[Plan] = []
        known: Sequence[Plan] = starts
        left = self.time_limit
        compile_kernels(progress)  # before any clock starts
        for k, budget in enumerate(steps):
            # The k-th of n gets k shares: small budgets are the hard ones. Unused time goes to the others.
            share = replace(self, time_limit=left * (k + 1) / sum(range(k + 1, len(steps) + 1)))

            def report(fraction: float, text: str, k: int = k) -> None:
                progress((k + fraction) / len(steps), text)

            session = _Session(share, graph, budget, report, starts, known)
            try:
                found.append(session.plan())
            except InfeasibleBudget:
                break
            finally:
                known = session.known
            left = max(0.0, left - (time.monotonic() - session.began))
        return pareto([*found, *(p for p in known if p not in found)])


class _Session:
    """The planning of one problem at one budget.

    ``starts``: the caller's plans. ``known``: all plans known so far, from which the best is returned.
    """

    def __init__(
        self,
        auto: Auto,
        graph: TrainingGraph,
        budget: int,
        progress: Progress,
        starts: Sequence[Plan],
        known: Sequence[Plan] = (),
    ) -> None:
        self.auto, self.given, self.budget, self.progress = auto, graph, budget, progress
        self.starts = starts
        self.began = time.monotonic()
        self.for_blocks = (
            without_inverses(graph) if graph.inverses else graph
        )  # with the stated phases, if any
        self.graph = graph = infer_phases(graph)
        self.plain = without_inverses(graph) if graph.inverses else graph
        self.known: list[Plan] = []
        self.order = Annealer(graph, keep_order=True) if auto.keep_order else None
        self.bound = BoundSearch(graph, budget)
        self.interrupted = False  # whether Ctrl-C ended an annealing, which still returned its best plan
        cores = (os.cpu_count() or 1) >= CORES
        self.two = graph.has_phases and cores  # without phases one search has two threads
        self.proof = Proof(self.bound, (PROVING if cores else 1.0) * auto.time_limit, auto.gap)
        self.take((*starts, *known))

    def plan(self) -> Plan:
        """Return the best plan found, with its bound.

        Raises:
            InfeasibleBudget: no plan was found that fits. The error has the smallest peak found.
        """
        with self.proof:
            try:
                if not self.finished and not self.solved_exhaustively():
                    self.gather()
                    self.search()
            except KeyboardInterrupt:
                if self.best is None:
                    raise
        if self.best is None:
            known: Known = "proven" if self.bound.best.unreachable else "searched"
            self.lower()
            self.take((cheap := self.cheap(),))
            least = self.smallest
            assert least is not None
            raise InfeasibleBudget(
                self.auto.name, self.budget, least.peak, known, plan=least, cheap=cheap.peak
            )
        return _with_bound(replace(self.best, budget=self.budget), self.bound.best)

    def take(self, plans: Sequence[Plan]) -> None:
        """Add plans to the known ones, except those that break an order that must be kept."""
        for plan in plans:
            if plan not in self.known and (self.order is None or self.order.accepts(runs_of(plan.schedule))):
                self.known.append(plan)
        self.proof.overhead = self.best_overhead

    @property
    def best(self) -> Plan | None:
        """The best known plan that fits; None if there is none."""
        fitting = (p for p in self.known if p.estimate.peak <= self.budget)
        return min(fitting, key=lambda p: (p.estimate.cost, p.estimate.peak), default=None)

    @property
    def smallest(self) -> Plan | None:
        """The known plan with the smallest peak."""
        return min(self.known, key=lambda p: p.estimate.peak, default=None)

    @property
    def finished(self) -> bool:
        """Whether the search is over: the gap is closed, or Ctrl-C ended an annealing."""
        return self.interrupted or self.good_enough(self.best_overhead)

    @property
    def best_overhead(self) -> float:
        """The overhead of the best plan so far; infinite if there is none."""
        return math.inf if self.best is None else self.best.estimate.overhead

    def good_enough(self, overhead: float) -> bool:
        """Return whether this overhead needs no improvement. For infinity: whether it is proven that no plan
        exists.
        """
        return overhead <= self.bound.best.overhead + max(CLOSED, self.auto.gap)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self.began + self.auto.time_limit - time.monotonic())

    @property
    def members_until(self) -> float:
        """The time of the monotonic clock at which the block strategies must end.

        While nothing fits, their time is counted from now, since their plans are then needed more.
        """
        now = time.monotonic()
        begun = self.began if self.best else now
        until = min(now + self.left, begun + MEMBERS * self.auto.time_limit)
        return max(until, begun + MEMBERS_LEAST)

    def gather(self) -> None:
        """Collect start plans: from the loss cut, from a first annealing, and from the block strategies."""
        near = self.take_cut_plan()
        if len(self.graph.ops) > VAST and near:
            return
        if self.best is None:  # the annealer works better from any plan that fits, even a costly one
            self.take(nested_plans(self.for_blocks, self.budget, self.members_until, self.report))
        if self.best is None:
            self.take((self.evicted(),))
        if self.two and not self.graph.inverses and SMALL <= len(self.graph.ops) <= VAST:
            self.anneal(self.graph, FIRST * self.left, alone=True)
            if self.finished:
                return
        self.take(starting_plans(self.for_blocks, self.budget, self.members_until, self.report))
        if self.graph.inverses:
            self.take(Reversible().curve(self.graph, ()))

    def evicted(self) -> Plan:
        """Return a plan that fits by eviction, or the one with the smallest peak that it finds."""
        until = time.monotonic() + EVICTION * self.auto.time_limit
        begun = self.smallest or no_recompute(self.graph)
        enough = max(self.budget, min_peak_bound(self.graph).bytes)
        go_on = partial(_is_before, until)
        return lower_by_eviction(self.graph, begun, enough, go_on, seed=self.auto.seed)

    def take_cut_plan(self) -> bool:
        """Add the plan that the loss cut's solution gives for the budget, and return whether its overhead is near the
        bound.
        """
        graph, bound = self.plain, self.bound
        if graph is not self.graph:
            bound = BoundSearch(graph, self.budget)
        if not graph.has_phases or not graph.base_cost or bound.loss_cut < 0 or self.bound.best.unreachable:
            return False
        floor = max(bound.price(bound.loss_cut) if graph is self.graph else -1.0, self.bound.best.overhead)
        until = self.began + CUT * self.auto.time_limit
        runs = cut_start(graph, bound.order, bound.loss_cut, self.budget, until)
        if runs is None:
            return False
        plan = plan_from_runs(self.graph, runs, "loss_cut")
        self.take((plan,))
        return plan.estimate.overhead <= floor + NEAR

    def solved_exhaustively(self) -> bool:
        """Solve a tiny problem by trying all schedules, and return whether that was possible."""
        ordered = self.graph.ordered or self.auto.keep_order
        exact = None if ordered else exhaustive(self.graph, self.budget)
        if exact is None:
            return False
        floor = math.inf
        if exact.cost < math.inf:
            plan = plan_from_runs(self.graph, exact.runs, "exhaustive")
            self.take((plan,))
            floor = plan.estimate.overhead
        if all(
            op.writes for op in self.graph.ops
        ):  # our plans also run ops that write nothing, which the problem does not require: then there is no bound
            self.bound.best = Bound(floor)
        return True

    def search(self) -> None:
        """Anneal, without the inverses first. If the annealer gives up before the time is spent, wait for the
        bound.
        """
        begun = self.best is not None and self.best in self.starts
        plain = self.graph.inverses and not begun
        final = self.graph if self.given.has_phases else self.given  # without phases, ops may be reordered

        def in_turn(graph: TrainingGraph, share: float, _starts: Sequence[Plan]) -> Plan | None:
            if self.finished:
                return None
            last = graph is final
            if (
                not last and graph is self.graph
            ):  # with inferred phases; it is searched again without them afterwards
                share = 1.0 if self.auto.keep_order else MARKED
            if self.anneal(graph, share * self.left) and last and not self.finished:
                self.proof.finish(self.left)
            return self.best

        marked = () if self.graph is final else (self.graph,)
        search_without_inverses_first((*([self.plain] if plain else []), *marked, final), PLAIN, in_turn)

    def anneal(self, graph: TrainingGraph, seconds: float, alone: bool = False) -> bool:
        """Anneal, and add the best and the leanest plan to the known ones.

        Return whether the annealer gave up before its time was spent. If Ctrl-C ended it, ``interrupted`` is set, and
        no further search should begin.

        Args:
            graph: the problem, or a variant of it.
            seconds: the time limit.
            alone: use another seed, and run no second annealing at the same time.
        """

        def report(_fraction: float, overhead: float | None) -> None:
            if overhead is not None:
                self.proof.overhead = min(self.proof.overhead, overhead)
            self.report(_text(overhead, self.bound.best.overhead))

        seed = self.auto.seed + (2 if alone else 0)
        search = Search(graph, self.budget, seed, self.auto.keep_order, self.good_enough, report)
        inverses = {op.name for op in self.graph.inverses} if graph is self.plain else set()
        starts = [runs_of(p.schedule) for p in (self.best, self.smallest) if p is not None]
        usable = [runs for runs in starts if inverses.isdisjoint(runs)]
        other = Search(graph, self.budget, self.auto.seed + 1, self.auto.keep_order, self.good_enough)
        search.suggest = other.suggest = lambda: self.bound.nearest
        other.suggested_to = (0,)
        try:
            with nullcontext() if alone else self.beside(other, usable, time.monotonic() + seconds):
                search.run(usable, SearchBudget(seconds))
        finally:
            found = (search.best, search.smallest, other.best, other.smallest)
            self.take([p for p in found if p is not None])
        self.interrupted = search.interrupted
        return search.ended_early

    def beside(
        self, other: Search, starts: Sequence[Sequence[str]], until: float
    ) -> AbstractContextManager[object]:
        """Return a context that runs a second annealing, if a core is free and the first one uses a single thread."""
        if not self.two or not other.graph.has_phases:
            return nullcontext()
        return SecondSearch(other, self.proof, until, starts)

    def lower(self) -> None:
        """Search for the plan with the smallest peak, for a refusal, as for the budget ``min``.

        The search takes what is left of the time. If the budget is proven to be too small, it takes a few seconds, or
        longer as long as much is gained, but no longer than for ``min``.
        """
        if not self.bound.best.unreachable:
            self.lower_for(self.left)
            return
        until, seconds, before = time.monotonic() + LEAST * self.auto.time_limit, ROUND, math.inf
        while (left := until - time.monotonic()) > 0:
            interrupted = self.lower_for(min(seconds, left))
            assert self.smallest is not None
            if interrupted or self.smallest.peak > (1 - GAIN) * before:
                return
            before, seconds = self.smallest.peak, 2 * seconds

    def lower_for(self, seconds: float) -> bool:
        """Search for the plan with the smallest peak for so many seconds. Return whether Ctrl-C ended the search."""
        effort, report = SearchBudget(seconds), partial(_looking, self.progress)
        order, seed = self.auto.keep_order, self.auto.seed
        found = find_smallest_peak(self.given, effort, self.known, report, keep_order=order, seed=seed)
        self.take((found,))
        return effort.interrupted

    def cheap(self) -> Plan:
        """Return the leanest plan found that costs little, for a refusal."""
        effort = SearchBudget(min(CHEAPLY, CHEAP_SHARE * self.auto.time_limit))
        order, seed = self.auto.keep_order, self.auto.seed
        return cheap_plan(self.graph, self.known, effort, seed=seed, keep_order=order)

    def report(self, text: str) -> None:
        """Report progress, with the share of the time that is spent."""
        spent = (time.monotonic() - self.began) / max(self.auto.time_limit, 1e-9)
        self.progress(min(1.0, spent), text)


def _with_bound(plan: Plan, bound: Bound) -> Plan:
    """Return the plan with its lower bound, and with the status ``optimal`` if the gap is closed."""
    overhead = plan.estimate.overhead
    if bound.overhead > overhead + CLOSED:  # the solver's result is wrong: no schedule is below a true bound
        return plan
    closed = overhead <= bound.overhead + CLOSED
    return replace(
        plan, lower_bound=min(bound.overhead, overhead), status="optimal" if closed else "feasible"
    )


def _is_before(until: float) -> bool:
    return time.monotonic() < until


def _looking(progress: Progress, fraction: float, _text: str) -> None:
    progress(fraction, "nothing fits; looking for the smallest peak")


def _text(overhead: float | None, bound: float) -> str:
    floor = "proven unreachable" if bound == math.inf else f"bound {100 * bound:.2f} %"
    if overhead is None:
        return f"nothing fits yet, {floor}"
    return f"overhead {100 * overhead:.2f} %, {floor}, gap {100 * max(0.0, overhead - bound):.2f} points"
