"""Capture the stages of a pipeline's ranks, convert the budget to bytes, and plan the stages of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rematplan.ir import InfeasibleBudget, ModelError, UsageError
from rematplan.pipeline.captured_stages import CapturedStage, StagePlace, captured_stage
from rematplan.pipeline.data_parallel import ALONE, DataParallel
from rematplan.pipeline.dataflow import dataflow_part
from rematplan.pipeline.frozen_stage import frozen_stage
from rematplan.pipeline.runnable_pipeline import CapturedPart, Pipeline
from rematplan.pipeline.schedules import SPLIT
from rematplan.pipeline.torch_memory import handed_on, output_bytes, stage_torch_memory
from rematplan.planner.core.plan import ops_of_plan, plan_from_json
from rematplan.planner.pipeline.actions import PipelineSchedule, stages_that_free_outputs
from rematplan.planner.pipeline.dataflow_plans import starting_plans
from rematplan.planner.pipeline.messages import CHANNELS
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.rank_search import RankPlan, RankSearch, plans_of_ranks
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import Budget
from rematplan.plans.in_flight import common_effort, stage_planner, trial_of_rank
from rematplan.plans.options import AUTO_SPLIT, PlanOptions
from rematplan.plans.planner import Planner
from rematplan.plans.progress import LOG
from rematplan.plans.splitting import (
    SplitTrial,
    SplitTrials,
    split_as_asked,
    split_as_planned,
    strategy_of_trials,
)
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.pipeline.stage_modules import StageModule
from rematplan.runtime.problem.loss_memory import LossMemory


def captured_part(
    order: PipelineSchedule,
    planner: Planner,
    number: int,
    stage: StageModule,
    parallel: DataParallel,
    loss: LossMemory | None,
) -> CapturedPart:
    """Capture stage ``number`` of a pipeline, or measure its forward if it has no gradients, and return it with its
    planning problem. ``parallel``: adds the memory of data parallelism. `ModelError` for a stage without gradients
    where the pipeline needs them."""
    device, frozen = stage.device, not any(one.requires_grad for one in stage.outputs)
    if frozen:
        _check_frozen(order, number, stage)
    template = stage_torch_memory(order, number, stage, device)
    template = template.adding(states=parallel.resident(stage, device))
    reducing = parallel.reducing(stage, device)
    if len(order.stage_of_rank[order.rank_of(number)]) == 1:
        template = template.adding(ending=max(0, reducing - template.standing.ending))
    else:  # the rank's other stages may have micro-batches in flight when this one reduces its gradients
        template = template.adding(states=reducing)
    if order.name in CHANNELS:
        return dataflow_part(stage, planner, template, number, order.stages, loss)
    place = StagePlace(
        first=number == 0,
        last=number == order.stages - 1,
        split=order.name in SPLIT,
        copied=parallel.copied(output_bytes(stage, device)),
        handed=handed_on(order, number, stage, device),
        freed=number in stages_that_free_outputs(order) and parallel.replicas == 1,
        alone=parallel == ALONE,
    )
    if frozen:
        return frozen_stage(number, stage, template, place)
    return captured_stage(stage, planner, template, place, loss)


def _check_frozen(order: PipelineSchedule, number: int, stage: StageModule) -> None:
    """Raise `ModelError` unless a pipeline can have a stage without gradients: not as the last one, behind a trained
    one, or in a dataflow."""
    if number == order.stages - 1 or any(one.requires_grad for one in stage.inputs):
        raise ModelError(
            f"stage {number} computes no gradients, so nothing before it can be trained: its outputs depend on no "
            f"trained parameter by a differentiable op"
        )
    if order.name in CHANNELS:
        raise ModelError(
            f"stage {number} computes no gradients, so a dataflow has no backward for it; cut later, or use another "
            f"schedule"
        )


def budget_bytes(stated: Budget, order: PipelineSchedule, parts: Mapping[int, CapturedPart]) -> int:
    """Convert a pipeline's budget for each rank to bytes. A share is one of the largest peak of a rank without
    recomputation, and needs ``parts`` of all stages."""
    if stated.kind == "bytes":
        return int(stated.amount)
    problems = {number: part.problem for number, part in parts.items()}
    all_kept = {number: one.measured(no_recompute(one.graph)) for number, one in problems.items()}
    peaks = (
        rank_peak(order.actions[rank], [all_kept[s] for s in order.stage_of_rank[rank]])
        for rank in range(order.ranks)
    )
    return int(stated.amount * max(peaks))


def rank_plans(pipe: Pipeline, ranks: Iterable[int], asked: PlanOptions) -> dict[int, RankPlan]:
    """Return, by rank, plans of its stages within the budget; `InfeasibleBudget` if a rank has none. Dataflow plans
    keep no more than `starting_plans` between forward and backward, if several micro-batches are in flight."""
    return plans_of_ranks(
        lambda rank, most: _search(replace(pipe, budget=most), rank, asked), ranks, pipe.budget
    )


def _search(pipe: Pipeline, rank: int, asked: PlanOptions) -> RankSearch:
    """Return a search, not run yet, for plans of a rank's stages."""
    problems = [pipe.parts[s].problem for s in pipe.order.stage_of_rank[rank]]
    actions = pipe.order.actions[rank]
    starts, kept = starting_plans(problems, actions) if pipe.order.name in CHANNELS else ([], [])
    planner, effort = stage_planner(asked.strategy), common_effort(asked)
    return RankSearch(problems, actions, pipe.budget, planner, effort, starts, kept)


def rewritten(
    pipe: Pipeline,
    ranks: Iterable[int],
    asked: PlanOptions,
    plans: Mapping[int, Mapping[str, Any]] | None = None,
) -> Pipeline:
    """Return the pipeline with the ops of these ranks' stages split and fused as the options say; `UsageError` if a
    named module has none to split. ``auto`` splits as in the stages' ``plans``, or if that is None, for the budget."""
    for rank in ranks if asked.rewrites else ():
        for number in pipe.order.stage_of_rank[rank]:
            part = pipe.parts[number]
            if isinstance(part, CapturedStage):
                planner, step = part.planner, part.original
                if asked.split == AUTO_SPLIT and plans is not None:
                    found = split_as_planned(planner, step, ops_of_plan(plans.get(number)))
                else:
                    found = split_as_asked(planner, step, _trials(pipe, rank, number, asked))
                found = planner.fused(found)
                for note in found.notes:
                    LOG.info("%s", note)
                if found.notes:
                    pipe = replace(pipe, parts={**pipe.parts, number: part.rewritten(found.step)})
    return pipe


def _trials(pipe: Pipeline, rank: int, number: int, asked: PlanOptions) -> SplitTrials:
    """Return trials of splits in one stage of a rank, whose other stages stay as they are."""
    short = replace(asked, strategy=strategy_of_trials(asked))

    def trial(step: CapturedStep) -> SplitTrial:
        part = pipe.parts[number]
        assert isinstance(part, CapturedStage)
        part = part.rewritten(step)
        search = _search(replace(pipe, parts={**pipe.parts, number: part}), rank, short)
        return trial_of_rank(part.problem.graph, search)

    return SplitTrials(pipe.budget, trial)


def stated_rank_plan(pipe: Pipeline, rank: int, plans: Mapping[int, Mapping[str, Any]]) -> RankPlan:
    """Read the plans of a rank's stages from JSON data, and compute the rank's peak with these plans. `UsageError` if a
    stage has none, `ProblemError` if one is of another problem, `InfeasibleBudget` if the peak exceeds the budget."""
    mine = pipe.order.stage_of_rank[rank]
    if missing := [s for s in mine if s not in plans]:
        raise UsageError(
            f"plans has no plan of stage {missing[0]}, which rank {rank} runs; it has plans of stages "
            f"{', '.join(map(str, sorted(plans))) or 'none'}"
        )
    own = [plan_from_json(dict(plans[s]), pipe.parts[s].problem.graph) for s in mine]
    figures = tuple(pipe.parts[s].problem.measured(plan) for s, plan in zip(mine, own, strict=True))
    peak = rank_peak(pipe.order.actions[rank], figures)
    if peak > pipe.budget:
        raise InfeasibleBudget(f"rank {rank}", pipe.budget, peak)
    return RankPlan(figures, tuple(own), peak, sum(one.times.extra for one in figures), 0.0)
