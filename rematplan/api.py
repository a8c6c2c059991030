"""The Python API for a single training step: load and capture a model, make its planning problem, plan, run, verify."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.phases import contradiction
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, Strategy, silent
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budget_searches import plan_within
from rematplan.plans.options import PlanOptions, stated_strategy
from rematplan.plans.progress import LOG
from rematplan.plans.step_problems import StepProblems
from rematplan.plans.tradeoff import trace_curves
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
    progress: Progress = silent,
    inverses: bool | float = True,
) -> TrainingGraph:
    """Return the planning problem of a captured training step: its ops and tensors, with the cost of each op in
    microseconds and the size of each tensor in bytes.

    Args:
        loaded: the captured step, from `load_step`.
        costs: ``roofline`` models the times of ops on a default device; the name of a device model, such as ``a100``;
            ``profile`` measures times and workspaces on the present device; or the path of a JSON file of a profile
            or a device model.
        progress: called with the fraction done (0 to 1) and a short text.
        inverses: the largest predicted relative error that a tensor may have after the step's inverses (ops that
            compute an input from an output) recover it. True: a limit that suits the tensor's type.

    Raises:
        UsageError: ``costs`` is unknown, the profile file lacks an op of the step, or
            ``inverses`` is not positive.
    """
    options = PlanOptions(budget="100%", costs=costs, inverses=inverses)
    return StepProblems(options, loaded.named).problem(loaded.step, progress)


def plan(
    graph: TrainingGraph,
    budget: int,
    strategy: str | Strategy = "auto",
    progress: Progress = silent,
) -> Plan:
    """Return the plan of least overhead that a strategy finds within ``budget`` bytes of simulated peak.

    A warning is logged if the problem states for some ops that they are forward or backward, and its graph shows
    otherwise.

    Args:
        graph: the planning problem.
        budget: bytes that the simulated peak must not exceed.
        strategy: a planning algorithm by its name, such as ``auto``, ``anneal`` or ``ilp``, or with its options, such
            as ``Anneal(moves=100_000)``.
        progress: called with the fraction done (0 to 1) and a short text.

    Raises:
        UsageError: the strategy or an option is unknown, or the strategy divides the forward half into blocks and the
            problem has no backward half.
        InfeasibleBudget: the strategy finds no plan that fits. The error has the smallest peak found.
    """
    _warn_of_contradiction(graph)
    return plan_within(stated_strategy(strategy), graph, budget, progress)


def curves(
    graph: TrainingGraph,
    strategies: Sequence[str | Strategy],
    budgets: Sequence[int],
    progress: Progress = silent,
) -> dict[str, tuple[Plan, ...]]:
    """Return the trade-off curve of each strategy: a dict from the strategy's name to its plans, by rising overhead and
    falling peak.

    A strategy is left out if the problem is too large for it, or if none of its plans fits any of the budgets.

    Args:
        graph: the planning problem.
        strategies: planning algorithms, by name or with their options.
        budgets: in bytes. A strategy that plans for one budget at a time plans for each of them. Other strategies
            ignore them.
        progress: called with the fraction done (0 to 1) and a short text.

    Raises:
        UsageError: a strategy is unknown, or it divides the forward half into blocks and the problem has no backward
            half.
    """
    _warn_of_contradiction(graph)
    chosen = {one.name: one for one in map(stated_strategy, strategies)}
    return trace_curves(graph, chosen, budgets, progress)[0]


def _warn_of_contradiction(graph: TrainingGraph) -> None:
    """Log a warning if ops are marked as forward or backward, and the order in which the graph reads its tensors shows
    otherwise."""
    if said := contradiction(graph):
        LOG.warning(said)
