"""The strategy ``auto``, which tries several methods and returns the best plan that any of them finds, with a proven
lower bound of the overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.annealing.falling_budget import plans_down_to
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.auto.auto_session import AutoSession
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.refusal_plans import plan_or_refuse
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.effort import MOVES_PER_SECOND, Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.search_rules import rules_of
from rematplan.planner.core.strategy import Progress, Strategy, pareto, silent


@dataclass(frozen=True)
class Auto(Strategy):
    """Combine all strategies under one time limit. The plan is never worse than that of any strategy that was run.

    Each plan has the name of the strategy that found it. The search does the following:

    - Problems of very few ops are solved by trying all schedules.
    - Block strategies make plans to start from. They get two fifths of the time, but at least a second. Up to 3000 ops,
      all of them are run (``exact_dp`` finds all plans of ``approx_dp``). For larger problems they would take longer
      than the annealing; then only ``approx_dp`` is run, with fewer lower sets. As long as no plan fits, ``nested_dp``
      is run first, for peaks near the budget, and the annealer starts from the leanest plan. Then the search for the
      smallest peak (`find_smallest_peak_in_stages`), which the budget ``min`` uses too, may take half of the time; it
      ends with the first plan that fits. For small problems it counts moves, so that it finds what ``min`` found even
      if the machine is busy and the time limit is exceeded.
    - A minimum cut at the boundary of forward and backward makes another plan to start from.
    - The annealer improves the best of these plans.
    - At the same time, a thread searches for a lower bound of the overhead. The annealer also starts from the solutions
      of its integer programs. With two cores or more, this thread gets three quarters of the time, and a second
      annealing gets the rest. Problems of 200 to 3000 ops with phases and without inverses then begin with a short
      annealing, because block strategies would slow down the search for the bound.

    The search ends when the plan is proven to be optimal within ``gap``, when nothing has improved for long, or when
    the time is up. Ctrl-C ends it with the best plan so far.

    If a problem without phases looks like a training step (`infer_phases`), it is searched with inferred phases first.
    Then it is searched without phases, so that ops may move between the halves. If the stated phases contradict the
    graph, block plans are made with the stated and with the inferred phases; everything else uses the inferred ones. A
    problem with inverses is searched without them first, unless the best known plan is one of ``starts``.

    Options: ``time_limit``: CPU seconds of the search, block strategies included; the search for the bound takes up to
    as many concurrently. A busy machine delays the end, by a factor of 4 at most. ``moves``: if not 0, the number of
    random changes that replaces the time limit; the plan is then the same on every machine. ``seed``: the seed of the
    random choices. ``keep_order``: whether the first runs of all ops keep the problem's order. ``reuse``: whether plans
    are saved on disk, as starts for later processes. ``gap``: the search ends when the plan's overhead is proven to
    exceed the optimum's by no more than this (0.001: a tenth of a percent of the step's time). ``deterministic``:
    whether `MOVES_PER_SECOND` moves replace each second of ``time_limit``.
    """

    time_limit: float = 30.0
    seed: int = 0
    keep_order: bool = False
    reuse: bool = True
    gap: float = 0.001
    moves: int = 0
    deterministic: bool = False

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the best of all strategies, annealed further, with a proven bound"

    resumes: ClassVar[bool] = True

    @property
    def lasting(self) -> bool:
        """Whether the plans are worth saving on disk, as starts for searches in later processes. This is the option
        ``reuse``; False if moves are counted, because the result must not depend on earlier processes."""
        return self.reuse and not self.counted

    @property
    def counted(self) -> int:
        """The number of moves that limits the search; 0 if its time does."""
        return self.moves or (round(self.time_limit * MOVES_PER_SECOND) if self.deterministic else 0)

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the cheapest plan found within ``budget`` bytes, with a proven lower bound of the overhead.

        The plan is never worse than any of ``starts`` that fits the budget (and keeps the problem's order, if
        ``keep_order`` is set).

        Raises:
            InfeasibleBudget: no plan was found that fits the budget. The error states the smallest peak found.
            KeyboardInterrupt: before any plan was found that fits. Later, Ctrl-C ends the search with the best plan so
                far.
        """
        compile_kernels(progress)
        effort = Effort(self.time_limit, self.counted)
        session = AutoSession(graph, budget, effort, rules_of(self), self.gap, progress, starts)
        return plan_or_refuse(session, self.name)

    def improved(
        self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort
    ) -> Plan | None:
        """Return the cheapest plan found within ``budget`` bytes; None if none fits. ``effort`` replaces the limits of
        this strategy. ``starts`` have the plans of block strategies, which are not run again; nor is the smallest peak
        searched for."""
        compile_kernels()
        return AutoSession(graph, budget, effort, rules_of(self), self.gap, silent, starts, brief=True).find()

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return the Pareto front of all plans found, by falling peak and rising overhead: no other plan beats or
        equals one of them in both peak and cost.

        ``budgets`` (bytes) are planned from the largest to the smallest. Each search starts from all plans found
        before. After the first budget that no plan fits, smaller ones are skipped. The time limit is for all budgets
        together.
        """
        steps = sorted(set(budgets), reverse=True)
        found: list[Plan] = []
        compile_kernels(progress)  # before any clock starts
        effort = Effort(self.time_limit, self.counted)
        known: Sequence[Plan] = (*starts, *self._falling(graph, steps, effort, progress))
        for k, budget in enumerate(steps):
            # The k-th of n gets k shares: small budgets are the hard ones. Unused effort goes to the others.
            amount = effort.left * (k + 1) / sum(range(k + 1, len(steps) + 1))
            share = Effort(self.time_limit, max(1, int(amount))) if self.counted else Effort(amount)

            def report(fraction: float, text: str, k: int = k) -> None:
                progress((k + fraction) / len(steps), text)

            session = AutoSession(graph, budget, share, rules_of(self), self.gap, report, starts, known)
            try:
                found.append(plan_or_refuse(session, self.name))
            except InfeasibleBudget:
                break
            finally:
                known = session.known
            effort.charge(moves=session.effort.done)
        return pareto([*found, *(p for p in known if p not in found)])

    def _falling(
        self, graph: TrainingGraph, steps: Sequence[int], effort: Effort, progress: Progress
    ) -> tuple[Plan, ...]:
        """Return plans at peaks that fall to the lowest of ``steps`` (the curve's budgets), by one annealing; Ctrl-C
        ends it with those found so far."""
        part = effort.part(SHARES.falling * effort.left)
        lowest = max(min(steps, default=0), min_peak_bound(graph).bytes)
        return plans_down_to(
            infer_phases(graph),
            lowest,
            part,
            rules=rules_of(self),
            report=lambda _: progress(0.0, "all budgets together"),
        )
