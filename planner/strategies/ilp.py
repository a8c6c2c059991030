"""The strategy `ilp`: an integer program for the whole schedule, in which ops may be recomputed anywhere and more than
once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.annealing.annealer import compile_annealer
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, refusal
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.loss_cut_start import cut_start
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import CLOSED, Plan, plan_from_runs, with_bound
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import INTERRUPTS, Progress, SearchStrategy, silent
from rematplan.planner.ilp.solver import Solver
from rematplan.planner.ilp.stage_program import DEPTH, StageProgram, add_violated, runs_at
from rematplan.planner.strategies.nested_dp import NestedDP


@dataclass(frozen=True)
class IlpLimits:
    """The constants of the strategy `ilp`, tuned by hand; no measurements were kept."""

    every_order: int = 10
    """The largest number of ops and inverses (ops that compute an input from an output) for which all orders of
    execution are considered."""
    start: float = 0.3
    """The fraction of the time limit for annealing, which finds a first plan and, with it, the order of first
    executions."""
    slice: float = 0.15
    """The fraction of the time limit for the first call of the solver; later calls may take longer."""
    most_ops: int = 1500
    """The largest number of ops for which an integer program is solved. For larger problems the annealed plan is
    returned, because no solver finds a better one."""


LIMITS = IlpLimits()


@dataclass(frozen=True)
class ILP(SearchStrategy):
    """Solve an integer program for the whole schedule, after Checkmate (Jain et al. 2020).

    Small problems, with at most 10 ops and inverses (ops that compute an input from an output) and no random draws to
    keep in order: all orders of execution are considered (solver CP-SAT). If the solver finishes, the plan is optimal
    among schedules with at most 2 · (ops and inverses) + 2 op executions.

    Larger problems: the order of first executions is that of an annealed plan (solver HiGHS), and only a few ops
    upstream of each op may run again before it. Inverses are not used. The plan need not be optimal.

    On Ctrl-C the best plan so far is returned.

    Options: ``time_limit``: seconds. ``upstream``: how many ops upstream of an op may run again before it.
    """

    upstream: int = DEPTH

    name: ClassVar[str] = "ilp"
    summary: ClassVar[str] = "integer program of the whole schedule (after Checkmate, Jain et al. 2020)"

    def __post_init__(self) -> None:
        if self.upstream < 0:
            raise UsageError(f"{self.name}: upstream is {self.upstream}; it must be at least 0")

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan of least overhead found within ``budget`` bytes, with a proven lower bound; arguments and
        errors are those of `Strategy.plan`. Plans of ``starts`` with inverses are ignored.

        Raises:
            KeyboardInterrupt: on Ctrl-C, before any plan was found that fits.
        """
        compile_annealer()  # before the clock starts
        graph, effort = infer_phases(graph), Effort(self.time_limit)
        floor = BoundSearch(graph, budget).best.overhead
        best = _Best(graph, budget, progress, floor, floor)
        inverses = {op.name for op in graph.inverses}
        for runs in ([op.name for op in graph.ops], *(runs_of(p.schedule) for p in starts)):
            if inverses.isdisjoint(runs):
                best.offer(runs)
        try:
            self._search(graph, budget, best, effort)
        except INTERRUPTS:
            if best.plan is None:
                raise
        if best.plan is None:
            plain = without_inverses(graph)
            blocks = NestedDP().around(plain, budget) if plain.has_phases else ()
            least = min((best.least, *blocks), key=lambda plan: plan.peak)
            raise refusal(self.name, plain, budget, least, effort.like(CHEAP_SHARE))
        return with_bound(replace(best.plan, budget=budget), min(best.bound, best.plan.estimate.overhead))

    def _search(self, graph: TrainingGraph, budget: int, best: _Best, effort: Effort) -> None:
        """Search for plans and record them in ``best``: by one integer program over all orders if ops are few and
        unordered, else by a minimum cut and annealing. An integer program with the annealed order of first executions
        follows if there are at most `IlpLimits.most_ops` ops. The search ends early if the best plan meets the lower
        bound or no plan can fit."""
        recipes = len(graph.recipes)
        if recipes <= LIMITS.every_order and not graph.ordered:
            # Imported here, because CP-SAT loads pandas and few problems are so small.
            from rematplan.planner.ilp.step_program import solve_steps

            found = solve_steps(graph, budget, 2 * recipes + 2, self.time_limit)
            if found is not None:
                best.offer(found)
            return
        plain = without_inverses(graph)
        search = BoundSearch(plain, budget)
        if search.loss_cut >= 0 and plain.base_cost:
            search.price(search.loss_cut)
            best.goal = search.best.overhead
            if plain is graph:  # a plan with inverses may have less overhead than all plans without them
                best.bound = best.goal
            part = effort.part(LIMITS.start * effort.total)
            start = (
                cut_start(plain, search.order, search.loss_cut, budget, part) if plain.has_phases else None
            )
            if start is not None:
                best.offer(start)
        if best.closed or search.best.unreachable:
            return
        self._anneal(plain, budget, best, effort.part(LIMITS.start * effort.total))
        if best.plan is not None and len(plain.ops) <= LIMITS.most_ops and plain.base_cost:
            program = StageProgram(plain, budget, runs_of(best.plan.schedule), self.upstream)
            with Solver() as solver:
                self._solve(program, solver, effort, best)

    def _anneal(self, graph: TrainingGraph, budget: int, best: _Best, effort: Effort) -> None:
        """Anneal from the best plan so far, within ``effort``. Record in ``best`` the plan found and the one with the
        smallest peak."""
        search = Search(graph, budget, enough=lambda overhead: overhead <= best.goal + CLOSED)
        found = search.run([runs_of(best.plan.schedule)] if best.plan else [], effort)
        if found is not None:
            best.offer(runs_of(found.schedule))
        best.offer(runs_of(search.least.schedule))

    def _solve(self, program: StageProgram, solver: Solver, effort: Effort, best: _Best) -> None:
        """Solve the integer program in slices of time, and record the plans found in ``best``. This ends when
        ``effort`` is spent, the solver can find nothing better, or no constraint excludes a solution that does not fit.
        The program is not exact about the peak: if the simulated schedule of a solution exceeds the budget, constraints
        are added that exclude it."""
        hint = program.hint()
        slice_ = LIMITS.slice * effort.total
        while not best.closed and not effort.over:
            best.report(effort.share_spent)
            answer = solver.solve(program.rows, effort.part(slice_), integer=True, gap=1.0, hint=hint)
            values = answer.values
            if values is None:
                if answer.done:
                    return
                slice_ *= 2
                continue
            hint = dict(enumerate(values))
            if best.offer(runs_at(program, values)):
                if answer.done:
                    return
                slice_ *= 1.5
            elif not add_violated(program, values):
                return


@dataclass
class _Best:
    """The best plan so far of one search by `ilp`."""

    graph: TrainingGraph
    budget: int
    progress: Progress
    bound: float
    """A proven lower bound of the overhead within the budget."""
    goal: float
    """A proven lower bound for plans without inverses. The search ends when the best plan reaches it."""
    plan: Plan | None = None
    """The cheapest plan that fits, or None."""
    _least: Plan | None = None

    def offer(self, runs: Sequence[str]) -> bool:
        """Simulate ``runs`` and return whether they fit the budget. They are recorded if they are the
        cheapest that fit, or have the smallest peak.
        """
        plan = plan_from_runs(self.graph, runs, ILP.name)
        if self._least is None or plan.peak < self._least.peak:
            self._least = plan
        fits = plan.estimate.peak <= self.budget
        if fits and (self.plan is None or plan.estimate.cost < self.plan.estimate.cost):
            self.plan = plan
        return fits

    @property
    def least(self) -> Plan:
        """The plan with the smallest peak so far, whether or not it fits the budget. `offer` must have been called
        before."""
        assert self._least is not None
        return self._least

    @property
    def closed(self) -> bool:
        """Whether it is proven that no plan without inverses is cheaper than the best one, up to a small tolerance."""
        return self.plan is not None and self.plan.estimate.overhead <= self.goal + CLOSED

    def report(self, fraction: float) -> None:
        """Call the progress callback with the fraction done (0 to 1), the best plan's overhead, and its lower bound."""
        text = "nothing fits yet"
        if self.plan is not None:
            text = f"overhead {100 * self.plan.estimate.overhead:.2f} %"
        floor = f", bound {100 * self.bound:.2f} %" if math.isfinite(self.bound) and self.bound >= 0 else ""
        self.progress(min(1.0, fraction), text + floor)
