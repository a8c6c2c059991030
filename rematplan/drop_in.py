"""The drop-in for any training loop: `plan_module`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from rematplan.api import priced
from rematplan.budgets import parse_budget
from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.plan import Plan
from rematplan.planner.simulator import simulate
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.registry import strategy as named_strategy
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.planner.strategy import Strategy
from rematplan.runtime.captured_step import CapturedStep
from rematplan.runtime.executor import named_tensors
from rematplan.runtime.inverses import with_exact_inverses, with_inverses
from rematplan.runtime.planned_module import planned_module, turning_schedule


def plan_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | int,
    strategy: str = "auto",
    options: Mapping[str, object] | None = None,
    costs: str = "profile",
    dynamic: bool = True,
    inverses: bool = False,
    max_inversion_error: float | None = None,
) -> nn.Module:
    """A module that does what ``model`` does, in any training loop, with a peak within ``budget``.

    It shares the model's parameters, buffers and state; ``planned.plan`` is the plan for the last way in which it was
    called. A first plan is made here, for ``args`` and ``kwargs``, without running the model; another shape, type or
    mode makes a further one when it is met, or is refused with ``dynamic=False``.

    ``budget``: bytes, or text such as ``8GiB`` or ``60%`` (of the peak without recomputation). It bounds all that a
    forward and backward hold: parameters, buffers, inputs, outputs and their gradients, activations, gradients of
    parameters and inputs, workspaces. ``costs``: ``profile`` measures ops on the present device, ``roofline`` models
    them, without workspaces. ``inverses`` (implied by the strategy ``reversible``): tensors may also be brought back by
    inverting what was computed from them, so that gradients are equal within rounding errors, not bit by bit;
    ``max_inversion_error`` bounds the predicted relative error of such a tensor (by default what fits its type).

    Raises:
        InfeasibleBudget: the strategy knows no plan that fits; carries the smallest peak that it can reach.
        UsageError: a malformed budget, an unknown strategy, option or kind of costs.
        ModelError: the model cannot be captured.
    """
    wanted = parse_budget(str(budget))
    chosen = named_strategy(strategy, **(options or {}))

    def planner(captured: CapturedStep) -> tuple[CapturedStep, Plan]:
        if inverses or strategy == Reversible.name:
            named = {f"model.{name}": tensor for name, tensor in named_tensors(model).items()}
            step = with_inverses(captured, named).step
        else:
            step = with_exact_inverses(captured)
        graph = priced(step, costs, max_inversion_error=max_inversion_error)
        base = no_recompute(graph).estimate.peak
        limit = wanted.bytes(base, lambda: 0)
        return step, _plan(step, graph, limit, chosen)

    planned = planned_module(model, planner, dynamic)
    return planned.prepare(*args, **(kwargs or {}))  # type: ignore[no-any-return,operator]


def _plan(step: CapturedStep, graph: TrainingGraph, budget: int, strategy: Strategy) -> Plan:
    """The strategy's plan with all outputs there at the turn, or a block plan if that takes it over the budget."""
    smallest = []
    for one in (strategy, ApproxDP()):
        # What the turn adds is known only when the plan is: ask again for that much less.
        limit = budget
        for _ in range(3):
            plan = one.plan(graph, limit)
            schedule = turning_schedule(step, graph, plan.schedule)
            estimate = simulate(graph, schedule)
            if estimate.peak <= budget:
                status = plan.status if estimate.cost <= plan.estimate.cost else "feasible"
                return replace(plan, schedule=schedule, estimate=estimate, budget=budget, status=status)
            smallest.append(estimate.peak)
            limit -= estimate.peak - budget
    raise InfeasibleBudget(strategy.name, budget, min(smallest))
