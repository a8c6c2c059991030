"""`plan_pipeline`: divide a model over the ranks of a PyTorch pipeline, with a plan and a budget for each rank."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.pipeline.auto_cuts import agreed, auto_cuts
from rematplan.pipeline.captured_stages import CapturedStage
from rematplan.pipeline.data_parallel import ALONE, DataParallel
from rematplan.pipeline.options import parse_rank_budget
from rematplan.pipeline.rank_plans import budget_bytes, captured_part, rank_plans, rewritten, stated_rank_plan
from rematplan.pipeline.runnable_pipeline import Pipeline
from rematplan.pipeline.schedules import MOST, schedule_of_stages
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.messages import CHANNELS
from rematplan.plans.budgets import Budget
from rematplan.plans.options import (
    AUTO_SPLIT,
    EAGER_KERNELS,
    NOT_IN_STAGES,
    UNSPLIT,
    PlanOptions,
    check_counts,
    stated_splits,
    stated_strategy,
)
from rematplan.plans.planner import Planner
from rematplan.runtime.capture.flat_module import check_call
from rematplan.runtime.graph.compat import MESSAGES_HAVE_GRADIENTS
from rematplan.runtime.pipeline.loss_storage import LossFunction, with_own_storage
from rematplan.runtime.pipeline.stage_modules import StageModule, stage_modules
from rematplan.runtime.problem.loss_memory import LossMemory
from rematplan.runtime.problem.policy import check_names, stated_policy

AUTO = "auto"


def plan_pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int = 4,
    microbatches: int,
    schedule: str = "1f1b",
    budget: str | int,
    cuts: str | Sequence[str] = "auto",
    strategy: str | Strategy = "auto",
    costs: str = "profile",
    loss_memory: str | int | None = None,
    loss_fn: LossFunction | None = None,
    target: torch.Tensor | None = None,
    ranks: Iterable[int] | None = None,
    plans: Mapping[int, Mapping[str, Any]] | None = None,
    hop: float = 0.0,
    inverses: bool | float = False,
    shards: int = 1,
    replicas: int = 1,
    split: str | Mapping[str, int] = UNSPLIT,
    policy: object = None,
    kernels: str = EAGER_KERNELS,
) -> Pipeline:
    """Divide a model into stages and plan the recomputation of each rank within a budget.

    Args:
        model: the model to divide.
        args: positional arguments of the model. Tensors are whole batches, which ``step`` divides along their first
            dimension into micro-batches; other values are passed unchanged.
        kwargs: keyword arguments of the model. Tensors are divided in the same way as those of ``args``.
        stages: the number of stages. The ranks of ``zbv``, ``dualpipev`` and the interleaved schedules have two each,
            the ranks of other schedules one.
        microbatches: the number of micro-batches in a batch.
        schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zbv``, ``interleaved-zb``, ``dualpipev`` or ``dataflow``. With
            ``dataflow``, a stage recovers its input in the backward by inverses, and sends it to the previous stage
            together with the input's gradient. So invertible stages keep nothing between forward and backward; a stage
            that is not invertible keeps its input.
        budget: bytes of each rank, or text such as ``8GiB``, or ``60%`` of the largest peak of a rank without
            recomputation. It bounds everything that a rank holds during a step that begins without gradients:
            parameters, buffers, gradients, activations of the micro-batches in flight, and PyTorch's buffers for
            messages. It does not include the batch and the targets, which the caller holds.
        cuts: names of the modules with which the second and each later stage begin, in running order; ``auto`` for
            those with the least simulated makespan within the budget, as ``rematplan pipeline`` chooses them. If
            ``ranks`` is given and a default process group exists, its first process chooses for all, so all must call
            this function.
        strategy: the planning algorithm, as for `plan_module`, with one lane. Of the options of ``auto`` the search
            follows ``time_limit``, ``moves``, ``seed`` and ``gap``. The limits are for each rank, and the time limit
            for the cuts, too.
        costs: how the costs of ops are determined: ``profile``, ``roofline`` or a file, as for `plan_module`.
        loss_memory: the peak of the loss, such as ``3x`` or ``1GiB``, as for `plan_module`.
        loss_fn: the loss that `Pipeline.schedule` will get. Its first argument is the model's output; for a tuple of
            one tensor it is that tensor. The loss is run once on random outputs, and its memory is measured; so the
            predicted peak is exact. It replaces ``loss_memory``, and needs ``target``.
        target: the targets of a batch, which ``step`` will get.
        ranks: the ranks to plan; by default all. A process that runs one rank needs only that.
        plans: plans that were made before, as JSON data like `StagePlan.plan`, by the stage's number. They are used
            instead of a search.
        hop: for ``dataflow``, the time of a message divided by the time of a stage's forward and backward. If it is
            above 0, more micro-batches are in flight for each hop to the last stage.
        inverses: for ``dataflow``, the largest relative error of a recovered tensor; by default it depends on the
            tensor's type.
        shards: the number of processes over which ``wrap`` shards each stage's parameters by FSDP2 (see
            `Pipeline.stages`). Each of them then holds its shard in addition to the gathered parameters.
        replicas: the number of processes in which ``wrap`` averages each stage's gradients by
            DistributedDataParallel. Each of them then holds buckets of gradients, copies of buffers that are broadcast,
            and a copy of the outputs of each micro-batch in flight.
        split: ``off``, ``auto``, or names of modules and the number of parts in which their ops run, as for
            `plan_module`. Cuts are chosen without splits. Not with ``dataflow``. With ``plans``, ``auto`` splits what
            they split.
        policy: what must be saved, as for `plan_module`. Cuts are chosen without it. Not with ``dataflow``.
        kernels: ``eager`` or ``fused``, as for `plan_module`. Cuts are chosen, and percentages become bytes, with those
            of eager mode. Not with ``dataflow``.

    Raises:
        InfeasibleBudget: no plans are found with which some rank stays within the budget. The error names the rank that
            needs the largest budget, and the smallest budget found for it. With this budget, plans are found for all of
            ``ranks``.
        UsageError: an unknown schedule, cut or rank, impossible numbers of stages or micro-batches, a batch that cannot
            be divided evenly, a malformed budget, an option of the strategy that stages cannot follow, impossible
            shards or replicas, a loss without targets, or ``plans`` that lack a stage of a rank.
        ModelError: the model cannot be divided into stages, or the loss cannot be computed.
    """
    check_call(model, args, kwargs)
    _check_lists(cuts, ranks, plans)
    asked = PlanOptions(
        budget="min",
        strategy=stated_strategy(strategy),
        costs=costs,
        loss_memory=loss_memory,
        inverses=inverses,
        split=stated_splits(split),
        policy=stated_policy(policy, model),
        kernels=kernels,
    )
    for one in NOT_IN_STAGES:
        if one.holds(asked):
            raise UsageError(f"plan_pipeline cannot be combined with {one.name}")
    order = _order(schedule, stages, microbatches, hop)
    for name, stated in {
        "split": asked.split != UNSPLIT,
        "policy": bool(asked.policy),
        "kernels='fused'": asked.fuses,
    }.items():
        if stated and order.name in CHANNELS:
            raise UsageError(f"{order.name} cannot be combined with {name}")
    if asked.inverses and order.name not in CHANNELS:
        raise UsageError(f"{order.name} cannot be combined with inverses; they are for dataflow")
    budgeted = parse_rank_budget(str(budget))
    parallel = DataParallel(shards, replicas)
    loss = _loss_and_target(loss_fn, target, loss_memory)
    ranks = None if ranks is None else tuple(ranks)
    if wrong := [rank for rank in ranks or () if rank not in range(order.ranks)]:
        raise UsageError(f"ranks has {wrong[0]!r}; the ranks of this pipeline are 0 to {order.ranks - 1}")
    pipe = captured_pipeline(model, args, kwargs, order, budgeted, cuts, asked, ranks, parallel, loss, plans)
    wanted = range(order.ranks) if ranks is None else sorted(set(ranks))
    if plans is None:
        made = rank_plans(pipe, wanted, asked)
    else:
        made = {rank: stated_rank_plan(pipe, rank, plans) for rank in wanted}
    return replace(pipe, ranks=made)


def captured_pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    order: PipelineSchedule,
    stated: Budget,
    cuts: str | Sequence[str],
    asked: PlanOptions,
    ranks: Iterable[int] | None = None,
    parallel: DataParallel = ALONE,
    loss: tuple[LossFunction, torch.Tensor] | None = None,
    plans: Mapping[int, Mapping[str, Any]] | None = None,
) -> Pipeline:
    """Cut a model into stages, capture those of ``ranks`` (all if None, or if the budget is a percentage), and return a
    pipeline without plans. `UsageError` for another number of cuts, or unknown names. ``plans``: those whose splits
    ``split="auto"`` repeats; None: splits are chosen for the budget."""
    stages, microbatches = order.stages, order.microbatches
    one_args, one_kwargs = _first_microbatch(args, kwargs or {}, microbatches)
    if cuts == AUTO:

        def choose() -> tuple[str, ...]:
            return auto_cuts(model, one_args, one_kwargs, order, stated, asked)

        cuts = choose() if ranks is None else agreed(choose)
    elif isinstance(cuts, str):
        cuts = cuts.split(",")
    if len(cuts) != stages - 1:
        raise UsageError(f"{stages} stages need {stages - 1} cuts, not {len(cuts)}")
    modules = stage_modules(model, one_args, one_kwargs, cuts)
    if MESSAGES_HAVE_GRADIENTS and order.name not in CHANNELS:
        _check_messages(modules)
    _check_splits(asked, modules)
    wanted = range(order.ranks) if ranks is None else sorted(set(ranks))
    needed = {s for rank in wanted for s in order.stage_of_rank[rank]}
    every = range(stages) if stated.kind != "bytes" else sorted(needed)
    memory = None
    if loss is not None and stages - 1 in every:
        memory = _measured_loss(modules[-1], *loss, microbatches)

    parts = {
        number: captured_part(order, Planner(_in_stage(asked, stage)), number, stage, parallel, memory)
        for number, stage in enumerate(modules)
        if number in every
    }
    if len(parts) == stages:
        steps = [part.step for part in parts.values() if isinstance(part, CapturedStage)]
        check_names(asked.policy, steps, type(model).__name__)
    amount = budget_bytes(stated, order, parts)  # a percentage refers to the step without splits
    return rewritten(Pipeline(order, tuple(cuts), amount, parts, {}), wanted, asked, plans)


def _check_splits(asked: PlanOptions, stages: Sequence[StageModule]) -> None:
    known = frozenset[str]().union(*(stage.modules for stage in stages))
    for name, _ in asked.stated_parts:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, sorted(known), 3, 0.3) or sorted(known)[:3])
            raise UsageError(f"split: no stage has ops of a module {name!r}; similar: {near}")


def _in_stage(asked: PlanOptions, stage: StageModule) -> PlanOptions:
    """Return the options with only the stated splits of modules that have ops in a stage; the options themselves for
    ``auto``."""
    if asked.split == AUTO_SPLIT:
        return asked
    inside = tuple(pair for pair in asked.stated_parts if pair[0] in stage.modules)
    return replace(asked, split=inside or UNSPLIT)


def _check_messages(stages: Sequence[StageModule]) -> None:
    """Raise `UsageError` unless every tensor that a stage receives from the previous one needs a gradient."""
    for number, stage in enumerate(stages[1:], 1):
        if not all(one.requires_grad for one in stage.inputs):
            raise UsageError(
                f"stage {number} receives a tensor that needs no gradient, and PyTorch {torch.__version__} cannot run "
                f"such pipelines; use PyTorch 2.13 or newer, or train a parameter of the first stage"
            )


def _loss_and_target(
    loss_fn: LossFunction | None, target: torch.Tensor | None, loss_memory: str | int | None
) -> tuple[LossFunction, torch.Tensor] | None:
    if loss_fn is None and target is None:
        return None
    if loss_fn is None or target is None:
        raise UsageError("state both loss_fn and target, or neither")
    if loss_memory is not None:
        raise UsageError("state loss_memory or loss_fn, not both")
    return loss_fn, target


def _measured_loss(
    stage: StageModule, loss_fn: LossFunction, target: torch.Tensor, microbatches: int
) -> LossMemory:
    """Measure the memory of the loss of one micro-batch. ``stage``: the last stage. ``target``: of a batch."""
    (first,), _ = _first_microbatch((target,), {}, microbatches)
    return LossMemory.measured(stage.outputs, first, with_own_storage(loss_fn), stage.device)


def _check_lists(cuts: object, ranks: object, plans: object) -> None:
    """Raise `UsageError` unless cuts are names, ranks numbers or None, and plans JSON data by stage or None."""
    if not isinstance(cuts, Sequence) or not all(isinstance(name, str) for name in cuts):
        raise UsageError(f"cuts is {cuts!r}; it must be 'auto' or a list of modules' names")
    if not (ranks is None or (isinstance(ranks, Collection) and all(isinstance(r, int) for r in ranks))):
        raise UsageError(f"ranks is {ranks!r}; it must be a list of whole numbers, or None")
    if not (
        plans is None
        or (isinstance(plans, Mapping) and all(isinstance(one, Mapping) for one in plans.values()))
    ):
        raise UsageError("plans must be a dictionary of plans as JSON data by number of stage, or None")


def _order(schedule: str, stages: int, microbatches: int, hop: float) -> PipelineSchedule:
    check_counts(1, stages=stages, microbatches=microbatches)
    if not isinstance(hop, (int, float)) or not 0 <= hop < MOST:
        raise UsageError(f"hop is {hop!r}; it must be a number of at least 0 and below {MOST}")
    return schedule_of_stages(schedule, stages, microbatches, hop)


def _first_microbatch(
    args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of the first of ``microbatches`` micro-batches. Tensors are divided
    evenly along their first dimension, else `UsageError`; other values are unchanged."""

    def part(one: Any) -> Any:
        """Return the first part of a tensor, any other value as it is. `UsageError` if the tensor cannot be divided
        evenly."""
        if not isinstance(one, torch.Tensor):
            return one
        if not one.ndim or one.shape[0] % microbatches:
            shape = tuple(one.shape)
            raise UsageError(
                f"a tensor of shape {shape} cannot be divided into {microbatches} equal micro-batches along its "
                f"first dimension"
            )
        return one.tensor_split(microbatches)[0]

    return tuple(map(part, args)), {name: part(one) for name, one in kwargs.items()}
