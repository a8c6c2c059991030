"""From what a user asks of a drop-in to the plan of a captured step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from rematplan.budgets import least_plan, parse_budget
from rematplan.ir import TrainingGraph, UsageError
from rematplan.overlapping import check_mode, overlapped, sharing_here
from rematplan.planner.lanes import Sharing
from rematplan.planner.plan import Plan, load_plan
from rematplan.planner.simulator import simulate
from rematplan.planner.strategies.registry import STRATEGIES, strategy
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import StoreAll, no_recompute
from rematplan.planner.strategy import Strategy
from rematplan.pricing import check_costs, priced
from rematplan.runtime.captured_step import CapturedStep
from rematplan.runtime.constraints import Name, ops_that_run_once
from rematplan.runtime.inverses import with_exact_inverses, with_inverses
from rematplan.runtime.turn import turning_problem


@dataclass(frozen=True)
class StepPlanner:
    """Plans the steps of a drop-in; the fields are the arguments of `plan_module`.

    Raises:
        UsageError: a malformed budget or none, an unknown strategy, option, kind of costs or overlap.
    """

    budget: str | int | None
    strategy: str = "auto"
    time_limit: float = 30.0
    options: Mapping[str, object] = field(default_factory=dict)
    costs: str = "profile"
    keep: tuple[Name, ...] = ()
    never_rerun: tuple[Name, ...] = ()
    plan: str | Path | None = None
    inverses: bool = False
    max_inversion_error: float | None = None
    overlap: str | None = None
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The values of parameters and buffers by the names that captured steps know them by, for scales to invert."""
    made: dict[tuple[object, ...], Plan] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Plans by all that decides which peaks there are: a step in which only a number is another needs no new search."""

    def __post_init__(self) -> None:
        if self.budget is None and self.plan is None:
            raise UsageError("state a budget, such as budget='8GiB', or a plan")
        if self.budget is not None:
            parse_budget(str(self.budget))
        self.chosen()
        check_costs(self.costs)
        check_mode(self.overlap)

    def chosen(self) -> Strategy:
        """The strategy with its options."""
        known = {f.name for f in fields(STRATEGIES.get(self.strategy, StoreAll))}
        limit = {"time_limit": self.time_limit} if "time_limit" in known else {}
        return strategy(self.strategy, **limit | dict(self.options))

    def problem(self, step: CapturedStep) -> TrainingGraph:
        """The step's planning problem, with all outputs there at the turn and the user's constraints."""
        priced_ = priced(step, self.costs, max_inversion_error=self.max_inversion_error)
        graph = turning_problem(step, priced_)
        once = ops_that_run_once(step, self.keep, self.never_rerun)
        return replace(graph, never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *once))))

    def opened(self, step: CapturedStep) -> CapturedStep:
        """The step with its inverses: all if they are wanted, else those that only move numbers."""
        if self.inverses or self.strategy == Reversible.name:
            return with_inverses(step, self.named, renormalise=True).step
        return with_exact_inverses(step)

    def __call__(self, step: CapturedStep) -> tuple[CapturedStep, Plan]:
        """The step with its inverses, and its plan.

        Raises: see `planned`.
        """
        step = self.opened(step)
        return step, self.planned(step)

    def planned(self, step: CapturedStep) -> Plan:
        """The plan of a step as it stands.

        Raises:
            InfeasibleBudget: the strategy knows no plan that fits; carries the smallest peak that it can reach.
            ProblemError: the saved plan is another graph's, or over the budget.
        """
        graph = self.problem(step)
        plan = self._one_lane(graph) if self.plan is None else load_plan(Path(self.plan), graph)

        def sharing() -> Sharing:
            return sharing_here(step, graph, plan) if self.costs == "profile" else Sharing()

        return overlapped(graph, plan, self.overlap, sharing)[0]

    def _one_lane(self, graph: TrainingGraph) -> Plan:
        recipes = (*graph.ops, *graph.inverses)
        sizes = tuple(t.bytes for t in graph.tensors)
        key = (graph.fingerprint, sizes, tuple(op.workspace for op in recipes))
        costs = tuple(op.cost for op in recipes)
        if key not in self.made:
            self.made[key] = replace(self._searched(graph), fingerprint=graph.fingerprint)
            self.made[*key, costs] = self.made[key]
        if (*key, costs) not in self.made:  # its bound is of other costs
            known = self.made[key]
            estimate = simulate(graph, known.schedule)
            return replace(known, estimate=estimate, lower_bound=None, status="feasible")
        return self.made[*key, costs]

    def _searched(self, graph: TrainingGraph) -> Plan:
        budget = parse_budget(str(self.budget))
        if budget.kind == "min":
            return least_plan(self.chosen(), graph)
        base = no_recompute(graph).estimate.peak
        return self.chosen().plan(graph, budget.bytes(base, lambda: 0))
