"""Auto: the best plan that rematplan knows to find, with a proven bound of what any plan could be."""

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
from rematplan.planner.annealing.restarts import Search, SearchBudget
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.auto.block_starts import VAST, leanest_plans, nested_plans, starting_plans
from rematplan.planner.auto.bound_thread import Proof
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.plain_first import plain_first
from rematplan.planner.auto.second_annealer import SecondSearch
from rematplan.planner.bounds.cut_bounds import CLOSED, Bound, min_peak_bound
from rematplan.planner.bounds.loss_cut_start import cut_start
from rematplan.planner.bounds.search import BoundSearch
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, Strategy, pareto, silent
from rematplan.planner.ilp.exhaustive import exhaustive
from rematplan.planner.strategies.reversible import Reversible

CUT = 0.3  # share of the time after which the loss cut is asked no more
MEMBERS = 0.4  # share of the time that the members may take
MEMBERS_LEAST = 1.0  # seconds that they may take, however short the time is (from when on: `members_until`)
MARKED = 0.6  # share of the search's time for a plain problem as the training step that it looks like
PLAIN = 0.4  # share of the search's time for the problem without its inverses, where it has any
REFUSAL = 0.15
"""Share of the time for finding what peak could be had, where the budget's is proven impossible; as much again may go
into block plans to start from."""
CORES = 2  # from which on a second search runs where the bound's has ended
PROVING = 0.75  # share of the time for the bound's search where a second search takes its core over
FIRST = 0.3  # share of the time for a first annealing, which makes the members unnecessary where it closes the gap
SMALL = 200  # ops below which the members take no time worth mentioning, and go first
NEAR = 0.005
"""A loss-cut plan of a vast problem this near to the bound makes block plans unnecessary."""


@dataclass(frozen=True)
class Auto(Strategy):
    """Never worse than any of the members that it asks; a plan carries the name of the member that found it.

    It asks all of them up to 3000 ops; above, where they would take longer than the annealing, only a thinned
    `approx_dp`; and as many as two fifths of the time (a second at least) allow. Where nothing fits yet, whatever the
    size, it asks `nested_dp` about its budget first.

    The block strategies' plans (`exact_dp` finds all that `approx_dp` finds) and the loss cut's start the annealing
    of the op sequence, while another process searches for a lower bound, whose own solutions are starts too. On two
    cores the bound has three quarters of the time, if it needs them, and a second annealing the rest; a first annealing
    of larger problems goes before the members, which would compete with the bound's search. The search ends when the
    gap is closed, nothing has improved for long, or the time is up. Problems of a few ops are solved exhaustively.
    Ctrl-C returns the best plan so far.

    A problem without phases that looks like a training step (`turn`) is searched as one first, then with reordering.

    Inverses are used where they help: a part of the time goes into a plan without them (unless a start is better than
    all that the members find), which the rest improves.

    With ``reuse``, whoever holds a `PlanStore` gives it the plans that earlier processes found as starts, and keeps
    what is found on disk: a plan for a smaller budget serves a larger one. ``gap``: the search ends once the plan's
    overhead is proven to be within this of the optimum's (0.001: a tenth of a percent of the step's time). Other
    options as for `Anneal`;
    ``time_limit`` counts from the start of planning, members included.
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
        """See `Strategy.lasting`."""
        return self.reuse

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """See `Strategy.plan`. The plan is never worse than a start that fits and keeps the order that is asked for."""
        compile_kernels(progress)
        return _Session(self, graph, budget, progress, starts).plan()

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """See `Strategy.curve`. From the largest budget down, each with all plans met before; the time limit holds for
        the whole curve."""
        steps = sorted(set(budgets), reverse=True)
        found: list[Plan] = []
        known: Sequence[Plan] = starts
        left = self.time_limit
        compile_kernels(progress)  # before any clock starts
        for k, budget in enumerate(steps):
            # The k-th of n gets k shares: small budgets are the hard ones. What one leaves, the others get.
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

    ``starts``: the caller's. ``known``: further plans that are known; those met are added.
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
        self.graph = graph = infer_phases(graph)
        self.plain = without_inverses(graph) if graph.inverses else graph
        self.known: list[Plan] = []
        self.order = Annealer(graph, keep_order=True) if auto.keep_order else None
        self.bound = BoundSearch(graph, budget)
        self.interrupted = False  # whether Ctrl-C ended an annealing, which returned all the same
        cores = (os.cpu_count() or 1) >= CORES
        self.two = graph.has_phases and cores  # without phases one search has two threads
        self.proof = Proof(self.bound, (PROVING if cores else 1.0) * auto.time_limit, auto.gap)
        self.take((*starts, *known))

    def plan(self) -> Plan:
        """The best plan found, with its bound.

        Raises:
            InfeasibleBudget: none was found; carries the smallest peak met.
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
            plan = self.least()
            raise InfeasibleBudget(self.auto.name, self.budget, plan.estimate.peak, known, plan=plan)
        return _with_bound(replace(self.best, budget=self.budget), self.bound.best)

    def take(self, plans: Sequence[Plan]) -> None:
        """Take plans in, except those that break the order that must be kept."""
        for plan in plans:
            if plan not in self.known and (self.order is None or self.order.accepts(runs_of(plan.schedule))):
                self.known.append(plan)
        self.proof.overhead = self.best_overhead

    @property
    def best(self) -> Plan | None:
        """The best plan so far that fits."""
        fitting = (p for p in self.known if p.estimate.peak <= self.budget)
        return min(fitting, key=lambda p: (p.estimate.cost, p.estimate.peak), default=None)

    @property
    def smallest(self) -> Plan | None:
        """The plan of the smallest peak so far."""
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
        """Whether no search for less is wanted, or no plan can exist."""
        return overhead <= self.bound.best.overhead + max(CLOSED, self.auto.gap)

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.began + self.auto.time_limit - time.monotonic())

    @property
    def members_until(self) -> float:
        """When the members' time ends; they are the more urgent where nothing fits yet."""
        now = time.monotonic()
        begun = self.began if self.best else now
        until = min(now + self.left, begun + MEMBERS * self.auto.time_limit)
        return max(until, begun + MEMBERS_LEAST)

    def gather(self) -> None:
        """Take in what the loss cut suggests, what a first annealing finds, and the members' plans."""
        near = self.take_cut_plan()
        if len(self.graph.ops) > VAST and near:
            return
        if self.best is None:  # from what fits, however dear, all else finds its way sooner
            self.take(nested_plans(self.plain, self.budget, self.members_until, self.report))
        if self.two and not self.graph.inverses and SMALL <= len(self.graph.ops) <= VAST:
            self.anneal(self.graph, FIRST * self.left, alone=True)
            if self.finished:
                return
        self.take(starting_plans(self.plain, self.budget, self.members_until, self.report))
        if self.graph.inverses:
            self.take(Reversible().curve(self.graph, ()))

    def take_cut_plan(self) -> bool:
        """Take in the loss cut's plan for the budget; whether it is near the bound."""
        graph, bound = self.plain, self.bound
        if graph is not self.graph:
            bound = BoundSearch(graph, self.budget)
        if not graph.has_phases or not graph.base_cost or bound.turn < 0 or self.bound.best.unreachable:
            return False
        floor = max(bound.price(bound.turn) if graph is self.graph else -1.0, self.bound.best.overhead)
        until = self.began + CUT * self.auto.time_limit
        runs = cut_start(graph, bound.order, bound.turn, self.budget, until)
        if runs is None:
            return False
        plan = plan_from_runs(self.graph, runs, "loss_cut")
        self.take((plan,))
        return plan.estimate.overhead <= floor + NEAR

    def solved_exhaustively(self) -> bool:
        """Whether the problem is so small that all schedules have been looked at."""
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
        ):  # all our plans run the others, but a problem does not ask for it
            self.bound.best = Bound(floor)
        return True

    def search(self) -> None:
        """Anneal, without the inverses first; then wait for the bound."""
        begun = self.best is not None and self.best in self.starts
        plain = self.graph.inverses and not begun

        def in_turn(graph: TrainingGraph, share: float, _starts: Sequence[Plan]) -> Plan | None:
            if self.finished:
                return None
            last = graph is self.given
            if (
                not last and graph is self.graph
            ):  # marked with phases: without that mark it is searched at last
                share = 1.0 if self.auto.keep_order else MARKED
            if self.anneal(graph, share * self.left) and last and not self.finished:
                self.proof.finish(self.left)
            return self.best

        marked = () if self.graph is self.given else (self.graph,)
        plain_first((*([self.plain] if plain else []), *marked, self.given), PLAIN, in_turn)

    def anneal(self, graph: TrainingGraph, seconds: float, alone: bool = False) -> bool:
        """Take in the best plan of an annealing, and the leanest; whether it gave up before its time. ``alone``: with
        a seed of its own, and no second search beside it. Where Ctrl-C ended it, nothing else is to be begun: that
        is noted in ``interrupted``."""

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
        """The second search, where the first is not one in two threads already and there is a core for it."""
        if not self.two or not other.graph.has_phases:
            return nullcontext()
        return SecondSearch(other, self.proof, until, starts)

    def least(self) -> Plan:
        """The plan of the smallest peak that a short descent finds."""
        if self.smallest is not None and not self.bound.best.unreachable:
            return self.smallest  # of a search that has tried for less

        search = Search(
            self.given,
            min_peak_bound(self.graph).bytes,
            self.auto.seed,
            self.auto.keep_order,
            report=partial(_looking, self.progress),
        )
        seconds = REFUSAL * self.auto.time_limit
        known = [self.smallest] if self.smallest else []
        blocks = leanest_plans(self.graph, time.monotonic() + seconds)
        search.prepare([runs_of(p.schedule) for p in (*known, *blocks)])
        effort = SearchBudget(seconds)
        search.descend(effort, effort.total)
        self.take((search.least,))
        assert self.smallest is not None
        return self.smallest

    def report(self, text: str) -> None:
        """Tell how far the time is."""
        spent = (time.monotonic() - self.began) / max(self.auto.time_limit, 1e-9)
        self.progress(min(1.0, spent), text)


def _with_bound(plan: Plan, bound: Bound) -> Plan:
    """The plan with its floor; optimal if the gap is closed."""
    overhead = plan.estimate.overhead
    if bound.overhead > overhead + CLOSED:  # a solver's error: no schedule can undercut a true bound
        return plan
    closed = overhead <= bound.overhead + CLOSED
    return replace(
        plan, lower_bound=min(bound.overhead, overhead), status="optimal" if closed else "feasible"
    )


def _looking(progress: Progress, fraction: float, _overhead: float | None) -> None:
    progress(fraction, "proven unreachable; looking for the smallest peak")


def _text(overhead: float | None, bound: float) -> str:
    floor = "proven unreachable" if bound == math.inf else f"bound {100 * bound:.2f} %"
    if overhead is None:
        return f"nothing fits yet, {floor}"
    return f"overhead {100 * overhead:.2f} %, {floor}, gap {100 * max(0.0, overhead - bound):.2f} points"
