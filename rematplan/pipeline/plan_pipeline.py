"""`plan_pipeline`: divide a model over the ranks of a PyTorch pipeline, with a plan and a budget for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, get_backend, get_rank, pipelining
from torch.distributed.device_mesh import DeviceMesh

from rematplan.ir import UsageError, show_bytes
from rematplan.pipeline.captured_stages import CapturedStage
from rematplan.pipeline.dataflow import DataflowPart, dataflow_stages
from rematplan.pipeline.rank_plans import Part, budget_bytes, captured_part, rank_plan, stated_rank_plan
from rematplan.pipeline.schedules import ONE_STAGE, SCHEDULES, SPLIT, schedule_named
from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan
from rematplan.planner.pipeline.in_flight import RankPlan
from rematplan.planner.pipeline.messages import CHANNELS, least_credits
from rematplan.planner.pipeline.rank_memory import in_flight
from rematplan.plans.budgets import Budget, parse_budget
from rematplan.plans.options import PlanOptions
from rematplan.plans.step_planner import StepPlanner
from rematplan.runtime.graph.compat import PIPELINES_SEND_TO_THEMSELVES
from rematplan.runtime.pipeline.dataflow_schedule import DataflowSchedule
from rematplan.runtime.pipeline.equal_cuts import equal_cuts
from rematplan.runtime.pipeline.stage_modules import exported, stage_modules
from rematplan.runtime.pipeline.torch_stages import torch_stage

TORCH_CLASSES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""For each schedule, its class in `torch.distributed.pipelining`."""


@dataclass(frozen=True)
class Pipeline:
    """A planned pipeline.

    ``order``: the schedule, with the actions of each rank. ``cuts``: the names of the modules with which the second
    and each later stage begin. ``budget``: the bytes that each rank may hold. ``parts``: the captured stages, by
    stage number. ``ranks``: the plans of a rank's stages, by rank; only planned ranks are included.
    """

    order: PipelineSchedule
    cuts: tuple[str, ...]
    budget: int
    parts: Mapping[int, Part]
    ranks: Mapping[int, RankPlan]

    @cached_property
    def stage_plans(self) -> tuple[StagePlan, ...]:
        """The memory, times and plan of each stage of the planned ranks, by rising stage number."""
        found = (one for rank in self.ranks.values() for one in rank.stages)
        return tuple(sorted(found, key=lambda one: one.stage))

    @property
    def peaks(self) -> dict[int, int]:
        """The predicted peak of each planned rank in bytes, including parameters, gradients and PyTorch's buffers."""
        return {rank: plan.peak for rank, plan in self.ranks.items()}

    def modules(self, rank: int) -> tuple[nn.Module, ...]:
        """Return the planned modules of a rank's stages. They share the model's parameters and buffers.

        Raises:
            UsageError: the schedule is ``dataflow``, whose stages run without autograd.
        """
        if self.order.name in CHANNELS:
            raise UsageError("stages of a dataflow run without autograd and are not modules; use stages()")
        parts = zip(
            (self.parts[s] for s in self.order.stage_of_rank[rank]), self.ranks[rank].plans, strict=True
        )
        return tuple(part.planned(plan) for part, plan in parts if isinstance(part, CapturedStage))

    def stages(
        self,
        mesh: DeviceMesh | ProcessGroup | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> list[Any]:
        """Return this process's stages, for `torch.distributed.pipelining`; for ``dataflow`` its `DataflowStage`.

        Args:
            mesh: a process group or a device mesh of one dimension, with the ranks of the pipeline; by default all
                processes.
            wrap: takes each planned module and returns the module to run, for example
                ``DistributedDataParallel(module)``.

        Raises:
            UsageError: the number of processes differs from the number of ranks; or ``wrap`` is given and the
                schedule splits backwards, which PyTorch does differently in wrapped modules, or is ``dataflow``, which
                needs processes that communicate over gloo.
        """
        group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        size, rank = torch.distributed.get_world_size(group), get_rank(group)
        if size != self.order.ranks:
            raise UsageError(f"the pipeline has {self.order.ranks} ranks, but there are {size} processes")
        mine = self.parts[self.order.stage_of_rank[rank][0]]
        if isinstance(mine, DataflowPart):
            return dataflow_stages(mine, self.ranks[rank].plans[0], group, wrap is not None)
        split = self.order.name in SPLIT
        if split and wrap is not None:
            raise UsageError(
                f"schedule {self.order.name!r} splits backwards, which wrapped stages do not allow; use gpipe, 1f1b "
                f"or interleaved"
            )
        made = []
        for number, module in zip(self.order.stage_of_rank[rank], self.modules(rank), strict=True):
            stage = self.parts[number].stage
            device = next((t.device for t in module.parameters()), torch.device("cpu"))
            run = wrap(module) if wrap else module
            made.append(torch_stage(stage, run, number, self.order.stages, device, group, split))
        return made

    def schedule(self, stages: Sequence[Any], loss_fn: Callable[..., torch.Tensor], **more: Any) -> Any:
        """Return PyTorch's schedule object for these stages, or a `DataflowSchedule`. Its method ``step`` runs the
        pipeline.

        Args:
            stages: this process's stages, from `stages`.
            loss_fn: computes the loss from the last stage's output and a micro-batch of targets.
            more: further arguments of the class, such as ``scale_grads``, or ``updates`` of a dataflow.

        Raises:
            UsageError: the schedule has neighbouring stages on one rank, and PyTorch before 2.13 cannot run that over
                gloo.
        """
        if self.order.name in CHANNELS:
            actions = [(a.kind, a.microbatch) for a in self.order.actions[stages[0].number]]
            credits = least_credits(self.order)  # its replay proves that nothing deadlocks
            return DataflowSchedule(stages[0], actions, self.order.microbatches, credits, loss_fn, **more)
        neighbours = any(b - a == 1 for own in self.order.stage_of_rank for a, b in pairwise(sorted(own)))
        if PIPELINES_SEND_TO_THEMSELVES and neighbours and get_backend() == "gloo":
            raise UsageError(
                f"{self.order.name} has neighbouring stages on one rank, and PyTorch {torch.__version__} cannot run "
                f"such schedules over gloo; use PyTorch 2.13 or newer, another backend, or schedule='interleaved'"
            )
        kind = getattr(pipelining, TORCH_CLASSES[self.order.name])
        own = stages[0] if len(self.order.stage_of_rank[0]) == 1 else list(stages)
        return kind(own, n_microbatches=self.order.microbatches, loss_fn=loss_fn, **more)

    def __str__(self) -> str:
        lines = [
            f"{self.order.name}, {self.order.microbatches} micro-batches, budget {show_bytes(self.budget)} a rank"
        ]
        for rank, plan in self.ranks.items():
            most = in_flight(self.order.actions[rank])
            for one in plan.stages:
                lines.append(
                    f"rank {rank} stage {one.stage}: {most[one.stage]} in flight, keeps {show_bytes(one.kept_bytes)}, "
                    f"transients {show_bytes(max(one.transient_forward, one.transient_backward, one.transient_weight))}"
                    f", states {show_bytes(one.states)}, torch {show_bytes(one.torch_bytes)}, "
                    f"extra {one.extra:.1f} µs"
                )
            lines.append(f"rank {rank}: peak {show_bytes(plan.peak)}")
        return "\n".join(lines)


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
    strategy: str = "auto",
    costs: str = "profile",
    time_limit: float = 30.0,
    loss_memory: str | int | None = None,
    ranks: Iterable[int] | None = None,
    plans: Mapping[int, Mapping[str, Any]] | None = None,
    hop: float = 0.0,
    max_inversion_error: float | None = None,
) -> Pipeline:
    """Divide a model into stages and plan the recomputation of each rank within a budget.

    Args:
        model: the model to divide.
        args: positional arguments of the model. Tensors are whole batches, which ``step`` divides along their first
            dimension into micro-batches; other values are passed unchanged.
        kwargs: keyword arguments, in the same way.
        stages: the number of stages. The ranks of ``zbv``, ``dualpipev`` and the interleaved schedules have two each,
            the ranks of other schedules one.
        microbatches: the number of micro-batches in a batch.
        schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zbv``, ``interleaved-zb``, ``dualpipev`` or ``dataflow``. In a
            dataflow each stage sends its input, which inverses recover, back with its gradient, so that invertible
            stages keep nothing between forward and backward; a stage that is not invertible keeps its input.
        budget: bytes of each rank, or text such as ``8GiB``, or ``60%`` of the largest peak of a rank without
            recomputation. It bounds everything that a rank holds during a step that begins without gradients:
            parameters, buffers, gradients, activations of the micro-batches in flight, and PyTorch's buffers for
            messages.
        cuts: names of the modules with which the second and each later stage begin, in running order; ``auto`` for
            stages with about equal work.
        strategy: as for `plan_module`.
        costs: as for `plan_module`.
        time_limit: seconds of search for each rank.
        loss_memory: as for `plan_module`.
        ranks: the ranks to plan; by default all. A process that runs one rank needs only that.
        plans: plans that were made before, by the stage's number, in the form of `StagePlan.plan`. They are used
            instead of planning.
        hop: for ``dataflow``, the time of a message divided by the time of a stage's forward and backward. If it is
            above 0, more micro-batches are in flight for each hop to the last stage.
        max_inversion_error: for ``dataflow``, the largest relative error of a recovered tensor; by default it depends
            on the tensor's type.

    Raises:
        InfeasibleBudget: a rank does not fit. The error names it and its smallest budget.
        UsageError: an unknown schedule or cut, a batch that cannot be divided evenly, a malformed budget.
        ModelError: the model cannot be divided into stages.
    """
    asked = PlanOptions(
        budget="min",
        strategy=strategy,
        time_limit=time_limit,
        costs=costs,
        loss_memory=loss_memory,
        max_inversion_error=max_inversion_error,
    )
    order = _order(schedule, stages, microbatches, hop)
    return planned_in_order(model, args, kwargs, order, parse_budget(str(budget)), cuts, asked, ranks, plans)


def planned_in_order(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    order: PipelineSchedule,
    stated: Budget,
    cuts: str | Sequence[str],
    asked: PlanOptions,
    ranks: Iterable[int] | None = None,
    plans: Mapping[int, Mapping[str, Any]] | None = None,
) -> Pipeline:
    """Plan a pipeline whose schedule is given.

    ``order``: the schedule. ``stated``: the budget. ``asked``: the options of planning, whose own budget is ignored.
    The other arguments and the errors are those of `plan_pipeline`.
    """
    stages, microbatches = order.stages, order.microbatches
    one_args, one_kwargs = _first_microbatch(args, kwargs or {}, microbatches)
    if isinstance(cuts, str):
        narrow = order.name in CHANNELS  # no inverse recovers what is cut within a branch of a coupling
        chosen = cuts.split(",") if cuts != "auto" else None
        cuts = chosen or equal_cuts(exported(model, one_args, one_kwargs), stages, narrow)
    if len(cuts) != stages - 1:
        raise UsageError(f"{stages} stages need {stages - 1} cuts, not {len(cuts)}")
    modules = stage_modules(model, one_args, one_kwargs, cuts)
    planner = StepPlanner(asked)
    wanted = range(order.ranks) if ranks is None else sorted(set(ranks))
    needed = {s for rank in wanted for s in order.stage_of_rank[rank]}
    every = range(stages) if stated.kind != "bytes" else sorted(needed)
    parts = {number: captured_part(order, planner, number, modules[number]) for number in every}
    most = budget_bytes(stated, order, parts)
    made = {
        rank: rank_plan(order, rank, parts, most, asked)
        if plans is None
        else stated_rank_plan(order, rank, parts, most, plans)
        for rank in wanted
    }
    return Pipeline(order, tuple(cuts), most, parts, made)


def _order(schedule: str, stages: int, microbatches: int, hop: float) -> PipelineSchedule:
    if schedule in ONE_STAGE or schedule not in SCHEDULES:
        return schedule_named(schedule, stages, microbatches, hop=hop)
    if stages % 2:
        raise UsageError(f"{schedule} has two stages on each rank, so stages must be even, not {stages}")
    return schedule_named(schedule, stages // 2, microbatches, each=2)


def _first_microbatch(
    args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the first micro-batch.

    Raises:
        UsageError: a tensor cannot be divided evenly.
    """

    def part(one: Any) -> Any:
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
