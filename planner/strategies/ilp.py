"""ILP: the whole schedule as an integer program, with recomputation at any point and more than once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, refusal
from rematplan.planner.annealing.restarts import Search
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.cut_bounds import CLOSED
from rematplan.planner.bounds.loss_cut_start import cut_start
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, SearchStrategy, silent
from rematplan.planner.ilp.solver import Solver
from rematplan.planner.ilp.stage_program import StageProgram, add_violated, runs_at


@dataclass(frozen=True)
class IlpLimits:
    """The constants of the strategy `ILP`, chosen by trial without a record of single measurements."""

    every_order: int = 10
    """The largest number of ops and inverses for which all orders are considered."""
    start: float = 0.3
    """The share of the time for annealing, which finds the order of first runs and a first plan."""
    slice: float = 0.15
    """The share of the time for the first call of the solver; later calls are longer."""
    most_ops: int = 1500
    """The largest number of ops for which an integer program is solved; beyond it no solver finds better plans, so
    the annealed plan is returned."""


LIMITS = IlpLimits()


@dataclass(frozen=True)
class ILP(SearchStrategy):
    """Solve integer programs of the whole schedule, after Checkmate (Jain et al. 2020).

    For up to 10 ops and inverses all orders are considered (solver CP-SAT); the result is optimal among schedules of
    at most 2 · (ops and inverses) + 2 runs. For larger problems the order is that of an annealed plan (solver
    HiGHS), without a guarantee: only a few ops upstream of each op may run again before it, and inverses are not
    used. Ctrl-C returns the best plan so far.

    Options: ``time_limit``: seconds. ``upstream``: how many upstream ops may run again before each op.
    """

    upstream: int = 24

    name: ClassVar[str] = "ilp"
    summary: ClassVar[str] = "integer program of the whole schedule (after Checkmate, Jain et al. 2020)"

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan of least overhead found within ``budget`` bytes, with a proven lower bound. Starts that
        run inverses are ignored.

        Raises:
            InfeasibleBudget: no plan was found that fits; the error states the smallest found peak.
            KeyboardInterrupt: before any plan was found that fits.
        """
        graph = infer_phases(graph)
        floor = BoundSearch(graph, budget).best.overhead
        best = _Best(graph, budget, progress, floor, floor)
        inverses = {op.name for op in graph.inverses}
        for runs in ([op.name for op in graph.ops], *(runs_of(p.schedule) for p in starts)):
            if inverses.isdisjoint(runs):
                best.offer(runs)
        try:
            self._search(graph, budget, best)
        except KeyboardInterrupt:
            if best.plan is None:
                raise
        if best.plan is None:
            effort = SearchBudget(CHEAP_SHARE * self.time_limit)
            raise refusal(self.name, without_inverses(graph), budget, best.least, effort)
        floor = min(best.bound, best.plan.estimate.overhead)
        closed = best.plan.estimate.overhead <= floor + CLOSED
        return replace(
            best.plan, budget=budget, lower_bound=floor, status="optimal" if closed else "feasible"
        )

    def _search(self, graph: TrainingGraph, budget: int, best: _Best) -> None:
        recipes = len(graph.ops) + len(graph.inverses)
        if recipes <= LIMITS.every_order and not graph.ordered:
            # Imported here, because CP-SAT loads pandas and few problems are so small.
            from rematplan.planner.ilp.step_program import solve_steps

            found = solve_steps(graph, budget, 2 * recipes + 2, self.time_limit)
            if found.runs is not None:
                best.offer(found.runs)
            return
        began = time.monotonic()
        plain = without_inverses(graph) if graph.inverses else graph
        search = BoundSearch(plain, budget)
        if search.loss_cut >= 0 and plain.base_cost:
            search.price(search.loss_cut)
            best.goal = search.best.overhead
            if plain is graph:  # with inverses there may be cheaper plans than any of these
                best.bound = best.goal
            until = began + LIMITS.start * self.time_limit
            start = (
                cut_start(plain, search.order, search.loss_cut, budget, until) if plain.has_phases else None
            )
            if start is not None:
                best.offer(start)
        if best.closed or search.best.unreachable:
            return
        self._anneal(plain, budget, best)
        if best.plan is not None and len(plain.ops) <= LIMITS.most_ops and plain.base_cost:
            program = StageProgram(plain, budget, runs_of(best.plan.schedule), self.upstream)
            with Solver() as solver:
                self._solve(program, solver, began, best)

    def _anneal(self, graph: TrainingGraph, budget: int, best: _Best) -> None:
        """Find a start that fits, and with it an order of first runs."""
        search = Search(graph, budget, enough=lambda overhead: overhead <= best.goal + CLOSED)
        found = search.run(best.starts(), SearchBudget(LIMITS.start * self.time_limit))
        if found is not None:
            best.offer(runs_of(found.schedule))
        best.offer(runs_of(search.least.schedule))

    def _solve(self, program: StageProgram, solver: Solver, began: float, best: _Best) -> None:
        """Solve in time slices, and add rows where the simulator finds a schedule that exceeds the budget."""
        hint = program.hint()
        seconds = LIMITS.slice * self.time_limit
        while not best.closed and (left := began + self.time_limit - time.monotonic()) > 0:
            best.report(1 - left / self.time_limit)
            answer = solver.solve(program.rows, min(seconds, left), integer=True, gap=1.0, hint=hint)
            values = answer.values
            if values is None:
                if answer.done:
                    return
                seconds *= 2
                continue
            hint = dict(enumerate(values))
            if best.offer(runs_at(program, values)):
                if answer.done:
                    return
                seconds *= 1.5
            elif not add_violated(program, values):
                return


@dataclass
class _Best:
    """The best plan so far of one search.

    ``bound``: a proven lower bound of the overhead of any plan. ``goal``: a proven lower bound of the overhead of
    plans without inverses, to which the search is limited. ``plan``: the cheapest plan that fits, or None.
    """

    graph: TrainingGraph
    budget: int
    progress: Progress
    bound: float
    goal: float
    plan: Plan | None = None
    _least: Plan | None = None

    def offer(self, runs: Sequence[str]) -> bool:
        """Evaluate a sequence of runs, record its plan if it is the cheapest that fits or has the smallest peak so far,
        and return whether it fits."""
        plan = plan_from_runs(self.graph, runs, ILP.name)
        if self._least is None or plan.peak < self._least.peak:
            self._least = plan
        fits = plan.estimate.peak <= self.budget
        if fits and (self.plan is None or plan.estimate.cost < self.plan.estimate.cost):
            self.plan = plan
        return fits

    @property
    def least(self) -> Plan:
        """The plan with the smallest peak so far, whether or not it fits. There is none before the first `offer`."""
        assert self._least is not None
        return self._least

    def starts(self) -> list[list[str]]:
        """Return the best plan's sequence of runs in a list, empty if there is no plan."""
        return [] if self.plan is None else [runs_of(self.plan.schedule)]

    @property
    def closed(self) -> bool:
        """Whether it is proven that no cheaper plan without inverses exists."""
        return self.plan is not None and self.plan.estimate.overhead <= self.goal + CLOSED

    def report(self, fraction: float) -> None:
        """Report the best plan's overhead and the bound, as progress."""
        text = "nothing fits yet"
        if self.plan is not None:
            text = f"overhead {100 * self.plan.estimate.overhead:.2f} %"
        floor = f", bound {100 * self.bound:.2f} %" if math.isfinite(self.bound) and self.bound >= 0 else ""
        self.progress(min(1.0, fraction), text + floor)
