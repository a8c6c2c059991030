"""The Python API for a single step: load and capture a model, make its planning problem, plan, run and verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.phases import contradiction
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.registry import strategy as named_strategy
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import plan_within
from rematplan.plans.op_costs import priced
from rematplan.plans.progress import LOG
from rematplan.plans.tradeoff import trace_curves
from rematplan.runtime.costs.device_models import DEFAULT_DEVICE_MODEL
from rematplan.step_loading import LoadedStep, Sizes, load_step
from rematplan.step_measurement import MeasuredPlan, StepReport, measure_plans, predicted_error, run_step

__all__ = [
    "LoadedStep",
    "MeasuredPlan",
    "Sizes",
    "StepReport",
    "curves",
    "load_step",
    "measure_plans",
    "no_recompute",
    "plan",
    "predicted_error",
    "problem",
    "run_step",
]


def problem(
    loaded: LoadedStep,
    costs: str = "roofline",
    device: str = DEFAULT_DEVICE_MODEL,
    progress: Progress = silent,
    max_inversion_error: float | None = None,
) -> TrainingGraph:
    """Return the planning problem of a step.

    Args:
        loaded: the step.
        costs: ``roofline`` models the costs of ops; ``profile`` measures them on the present device; otherwise the
            path of a file that ``rematplan profile`` wrote.
        device: the name of the device model for ``roofline``.
        progress: called with the fraction done and a short text.
        max_inversion_error: the largest relative error that a tensor may have after it is recovered by inverses; by
            default one that suits its type.

    Raises:
        UsageError: unknown costs or device model, or a profile file that lacks an op of the step.
    """
    return priced(loaded.step, costs, device, progress, max_inversion_error)


def plan(
    graph: TrainingGraph,
    budget: int,
    strategy: str = "auto",
    options: Mapping[str, object] | None = None,
    progress: Progress = silent,
) -> Plan:
    """Return the best plan that a strategy finds within ``budget`` bytes.

    Args:
        graph: the planning problem.
        budget: bytes that the simulated peak must not exceed.
        strategy: the name of a strategy.
        options: the strategy's options, by name.
        progress: called with the fraction done and a short text.

    Raises:
        UsageError: an unknown strategy or option.
        InfeasibleBudget: the strategy finds no plan that fits. The error has the smallest peak found.
    """
    _warn_of_contradiction(graph)
    return plan_within(named_strategy(strategy, **(options or {})), graph, budget, progress)


def curves(
    graph: TrainingGraph,
    strategies: Sequence[str],
    budgets: Sequence[int],
    progress: Progress = silent,
) -> dict[str, tuple[Plan, ...]]:
    """Return each strategy's trade-off curve: plans by rising overhead and falling peak, by the strategy's name.

    A strategy for which the problem is too large is left out. ``budgets``: bytes; used by strategies that plan for
    one budget at a time.

    Raises:
        UsageError: an unknown strategy.
    """
    _warn_of_contradiction(graph)
    chosen = {name: named_strategy(name) for name in strategies}
    return trace_curves(graph, chosen, budgets, progress)[0]


def _warn_of_contradiction(graph: TrainingGraph) -> None:
    """Log a warning if the stated phases contradict the graph."""
    if said := contradiction(graph):
        LOG.warning(said)
