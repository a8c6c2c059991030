"""The strategy ``auto``: the best plan that any of the methods here finds, with a proven lower bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.auto_options import SessionOptions
from rematplan.planner.auto.auto_session import AutoSession
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, Strategy, pareto, silent


@dataclass(frozen=True)
class Auto(Strategy):
    """Combine all strategies under one time limit. The plan is never worse than that of a strategy that was run.

    A plan carries the name of the strategy that found it. The steps are:

    - Problems of a few ops are solved exhaustively.
    - Block strategies make start plans, in at most two fifths of the time (but at least a second). Up to 3000 ops
      all of them are run (``exact_dp`` finds all plans of ``approx_dp``); above, where they would take longer than
      the annealing, only an ``approx_dp`` over fewer lower sets. While nothing fits, ``nested_dp`` is run first, for
      peaks near the budget.
    - A minimum cut at the boundary of forward and backward makes another start plan.
    - The annealer improves the best of these plans.
    - At the same time a thread searches for a lower bound; the annealer also starts from its integer programs'
      solutions. With two cores or more the thread gets three quarters of the time, and a second annealing gets the
      rest. Then problems of 200 to 3000 ops without inverses begin with a short annealing, since block strategies
      compete with the search for the bound.

    The search ends when the plan is proven to be optimal within ``gap``, when nothing has improved for long, or when
    the time is up. Ctrl-C ends it with the best plan so far.

    A problem without phases that looks like a training step (`infer_phases`) is searched with inferred phases first,
    then without them, so that ops may change halves. If stated phases contradict the graph, block plans are made
    with the stated phases and with inferred ones; everything else uses the inferred ones. A problem with inverses is
    searched without them first, unless the best known plan is a given start.

    Options: ``time_limit``: seconds, from the start of planning, block strategies included. ``seed``: of the random
    choices. ``keep_order``: whether the first runs of all ops keep the problem's order. ``reuse``: whether plans are
    worth keeping on disk, as starts for later processes. ``gap``: end the search when the plan's overhead is proven
    to exceed the optimum's by no more than this (0.001: a tenth of a percent of the step's time).
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
        """Whether the plans are worth keeping on disk, as starts for later processes: the option ``reuse``."""
        return self.reuse

    @property
    def _options(self) -> SessionOptions:
        return SessionOptions(self.name, self.time_limit, self.seed, self.keep_order, self.gap)

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the best plan found within ``budget`` bytes, with a proven lower bound of the overhead.

        The plan is never worse than a start that fits (and keeps the order, if ``keep_order`` is set).

        Raises:
            InfeasibleBudget: no plan was found that fits. The error states the smallest peak found.
            KeyboardInterrupt: before any plan was found that fits. Later Ctrl-C ends the search with the best plan
                so far.
        """
        compile_kernels(progress)
        return AutoSession(self._options, graph, budget, progress, starts).plan()

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return the plans found, by falling peak and rising overhead; none is beaten or equalled by another in
        both.

        ``budgets`` (bytes) are planned from the largest to the smallest, each with all plans found before as starts.
        After the first budget that no plan fits, smaller ones are skipped. The time limit holds for all budgets
        together.
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

            session = AutoSession(share._options, graph, budget, report, starts, known)
            try:
                found.append(session.plan())
            except InfeasibleBudget:
                break
            finally:
                known = session.known
            left = max(0.0, left - (time.monotonic() - session.began))
        return pareto([*found, *(p for p in known if p not in found)])
