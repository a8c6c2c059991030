"""Plan a module as a stage, while a user's schedule has several micro-batches between forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

from rematplan.ir import InfeasibleBudget, TrainingGraph, UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.pipeline.actions import Action, RankActions
from rematplan.planner.pipeline.auto_stages import AutoStages, StrategyStages
from rematplan.planner.pipeline.gpipe_and_1f1b import one_stage_a_rank
from rematplan.planner.pipeline.rank_search import SHORTEST, RankSearch, StagePlanner
from rematplan.planner.pipeline.stage_plan import StagePlan, StandingBytes
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.plans.options import PlanOptions
from rematplan.plans.refining import StepPlan
from rematplan.plans.splitting import SplitTrial
from rematplan.plans.stage_problems import backward_spare, stage_problem
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_memory import LossMemory


def stage_planner(strategy: Strategy) -> StagePlanner:
    """Return an object that plans the stages of a rank."""
    if not isinstance(strategy, Auto):
        return StrategyStages(strategy)
    return AutoStages(math.inf, strategy.seed, strategy.gap)


def common_effort(asked: PlanOptions, most: float = math.inf) -> Effort:
    """Return what all searches of one planning may do together: the moves that `Auto` counts, else the seconds of the
    time limit, at most ``most`` and at least `SHORTEST`."""
    moves = asked.strategy.counted if isinstance(asked.strategy, Auto) else 0
    return Effort(moves=moves) if moves else Effort(max(SHORTEST, min(asked.time_limit, most)))


def with_in_flight(in_flight: int, deferred: int | None) -> RankActions:
    """Return the actions of a rank for a few micro-batches: ``in_flight`` forwards, then backwards and forwards
    alternate. If ``deferred`` is not None, weight gradients follow that many backwards later."""
    microbatches = 2 * in_flight + (deferred or 0) + 1
    (actions,) = one_stage_a_rank("in flight", [in_flight], microbatches).actions
    if deferred is None:
        return actions
    split: list[Action] = []
    for a in actions:
        split.append(replace(a, kind="I") if a.kind == "B" else a)
        if a.kind == "B" and a.microbatch >= deferred:
            split.append(Action("W", a.stage, a.microbatch - deferred))
    late = range(max(0, microbatches - deferred), microbatches)
    return (*split, *(Action("W", 0, m) for m in late))


def problem_in_flight(step: CapturedStep, graph: TrainingGraph, loss: LossMemory) -> StageProblem:
    """Make the problem of a step of which several micro-batches are in flight."""
    # The caller's variable holds a loss of an earlier micro-batch until the next one is computed.
    template = StagePlan(0, standing=StandingBytes(loss.kept))
    return stage_problem(
        step, graph, per_microbatch=("batch",), tangents=("tangent",), between=loss.between, template=template
    )


def budget_in_flight(problem: StageProblem, asked: PlanOptions) -> int:
    """Return the budget in bytes. A share, such as ``60%``, is one of the peak of ``problem`` without recomputation;
    `UsageError` for ``min``, ``least`` and shares of activations."""
    budget = asked.stated_budget()
    if budget.kind == "bytes":
        return int(budget.amount)
    if budget.kind == "share":
        return int(budget.amount * search_in_flight(problem, 0, asked).kept_peak())
    raise UsageError(f"with in_flight, state the budget in bytes or as a percentage, not as {budget.text!r}")


def _actions(asked: PlanOptions) -> RankActions:
    return with_in_flight(asked.in_flight.calls, asked.in_flight.deferred)


def search_in_flight(problem: StageProblem, most: int, asked: PlanOptions) -> RankSearch:
    """Return a search, not run yet, for a plan of a step with several micro-batches in flight within ``most`` bytes."""
    planner = stage_planner(asked.strategy)
    return RankSearch([problem], _actions(asked), most, planner, common_effort(asked))


def trial_of_rank(graph: TrainingGraph, search: RankSearch) -> SplitTrial:
    """Return a trial of splits in one stage of a rank. ``graph``: the stage's problem."""

    def overhead() -> float:
        search.effort.begin()  # other trials may have run since it was made
        return search.brief_overhead()

    return SplitTrial(graph, search.kept_peak, overhead)


def plan_in_flight(step: CapturedStep, problem: StageProblem, most: int, asked: PlanOptions) -> StepPlan:
    """Plan a step that runs for several micro-batches in flight, within ``most`` bytes for all of them;
    `InfeasibleBudget` if no plan is found."""
    try:
        found = search_in_flight(problem, most, asked).run()
    except InfeasibleBudget as error:
        raise replace(error, strategy=asked.strategy.name) from None
    (plan,) = found.plans
    cost = problem.graph.base_cost
    share = found.floor / cost if cost else 0.0
    spare = backward_spare(problem, plan.schedule)
    plan = replace(plan, lower_bound=share, fingerprint=problem.graph.fingerprint)
    return StepPlan(step, plan, spare, problem.gradient_bytes)
