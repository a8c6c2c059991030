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
from torch.distributed.pipelining import PipelineStage

from rematplan.ir import InfeasibleBudget, UsageError, show_bytes
from rematplan.pipeline.captured_stages import CapturedStage, captured_stage
from rematplan.pipeline.schedules import SPLIT, schedule_named
from rematplan.pipeline.torch_memory import handed_on, held_by_torch
from rematplan.planner.core.plan import plan_from_json
from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan
from rematplan.planner.pipeline.in_flight import RankPlan, RankSearch
from rematplan.planner.pipeline.rank_memory import in_flight, rank_peak
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import Budget, parse_budget
from rematplan.plans.in_flight import stage_planner
from rematplan.plans.options import PlanOptions
from rematplan.plans.step_planner import StepPlanner
from rematplan.runtime.graph.compat import PIPELINES_SEND_TO_THEMSELVES
from rematplan.runtime.pipeline.equal_cuts import equal_cuts
from rematplan.runtime.pipeline.stage_modules import StageModule, exported, stage_modules
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

    ``order``: the actions of each rank. ``cuts``: the modules with which the second and each later stage begin.
    ``budget``: bytes of each rank. ``parts``: the captured stages, by number. ``ranks``: the plans of each planned
    rank's stages.
    """

    order: PipelineSchedule
    cuts: tuple[str, ...]
    budget: int
    parts: Mapping[int, CapturedStage]
    ranks: Mapping[int, RankPlan]

    @cached_property
    def stage_plans(self) -> tuple[StagePlan, ...]:
        """The memory, times and plan of each stage."""
        found = (one for rank in self.ranks.values() for one in rank.stages)
        return tuple(sorted(found, key=lambda one: one.stage))

    @property
    def peaks(self) -> dict[int, int]:
        """The most bytes that each rank holds, including parameters, gradients and PyTorch's buffers."""
        return {rank: plan.peak for rank, plan in self.ranks.items()}

    def modules(self, rank: int) -> tuple[nn.Module, ...]:
        """Return the planned modules of a rank's stages. They share the model's parameters and buffers."""
        mine = self.order.stage_of_rank[rank]
        plans = self.ranks[rank].plans
        return tuple(self.parts[s].planned(plan) for s, plan in zip(mine, plans, strict=True))

    def stages(
        self,
        mesh: DeviceMesh | ProcessGroup | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> list[PipelineStage]:
        """Return this process's stages, for `torch.distributed.pipelining`.

        Args:
            mesh: a process group or a device mesh of one dimension, with the ranks of the pipeline; by default all
                processes.
            wrap: takes each planned module and returns the module to run, for example
                ``DistributedDataParallel(module)``.

        Raises:
            UsageError: the number of processes differs from the number of ranks; or ``wrap`` is given and the
                schedule splits backwards, which PyTorch does differently in wrapped modules.
        """
        group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        size, rank = torch.distributed.get_world_size(group), get_rank(group)
        if size != self.order.ranks:
            raise UsageError(f"the pipeline has {self.order.ranks} ranks, but there are {size} processes")
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

    def schedule(
        self, stages: Sequence[PipelineStage], loss_fn: Callable[..., torch.Tensor], **more: Any
    ) -> Any:
        """Return PyTorch's schedule object for these stages. Its method ``step`` runs the pipeline.

        Args:
            stages: this process's stages, from `stages`.
            loss_fn: computes the loss from the last stage's output and a micro-batch of targets.
            more: further arguments of the class, such as ``scale_grads``.

        Raises:
            UsageError: the schedule has neighbouring stages on one rank, and PyTorch before 2.13 cannot run that over
                gloo.
        """
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
) -> Pipeline:
    """Divide a model into stages and plan the recomputation of each rank within a budget.

    Args:
        model: the model to divide.
        args: positional arguments of the model. Tensors are whole batches, which ``step`` divides along their first
            dimension into micro-batches; other values are passed unchanged.
        kwargs: keyword arguments, in the same way.
        stages: the number of stages. The ranks of ``zbv``, ``dualpipev`` and the interleaved schedules have two each,
            the ranks of ``gpipe`` and ``1f1b`` one.
        microbatches: the number of micro-batches in a batch.
        schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zbv``, ``interleaved-zb`` or ``dualpipev``.
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

    Raises:
        InfeasibleBudget: a rank does not fit. The error names it and its smallest budget.
        UsageError: an unknown schedule or cut, a batch that cannot be divided evenly, a malformed budget.
        ModelError: the model cannot be divided into stages.
    """
    stated = parse_budget(str(budget))
    asked = PlanOptions(
        budget="min", strategy=strategy, time_limit=time_limit, costs=costs, loss_memory=loss_memory
    )
    order = _order(schedule, stages, microbatches)
    one_args, one_kwargs = _first_microbatch(args, kwargs or {}, microbatches)
    if isinstance(cuts, str):
        cuts = (
            equal_cuts(exported(model, one_args, one_kwargs), stages) if cuts == "auto" else cuts.split(",")
        )
    if len(cuts) != stages - 1:
        raise UsageError(f"{stages} stages need {stages - 1} cuts, not {len(cuts)}")
    modules = stage_modules(model, one_args, one_kwargs, cuts)
    planner = StepPlanner(asked)
    wanted = range(order.ranks) if ranks is None else sorted(set(ranks))
    needed = {s for rank in wanted for s in order.stage_of_rank[rank]}
    every = range(stages) if stated.kind != "bytes" else sorted(needed)
    parts = {number: _captured(order, planner, number, modules[number]) for number in every}
    most = _bytes_of(stated, order, parts)
    made = {
        rank: _rank_plan(order, rank, parts, most, asked)
        if plans is None
        else _rank_plan_of(order, rank, parts, most, plans)
        for rank in wanted
    }
    return Pipeline(order, tuple(cuts), most, parts, made)


def _order(schedule: str, stages: int, microbatches: int) -> PipelineSchedule:
    if schedule in ("gpipe", "1f1b"):
        return schedule_named(schedule, stages, microbatches)
    if schedule not in TORCH_CLASSES:
        raise UsageError(f"unknown schedule {schedule!r}; known: {', '.join(TORCH_CLASSES)}")
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


def _captured(
    order: PipelineSchedule, planner: StepPlanner, number: int, stage: StageModule
) -> CapturedStage:
    device = next((t.device for t in stage.module.parameters()), torch.device("cpu"))
    template = held_by_torch(order, number, stage, device)
    last = number == order.stages - 1
    handed = handed_on(order, number, stage, device)
    return captured_stage(stage, planner, template, last=last, split=order.name in SPLIT, handed=handed)


def _bytes_of(stated: Budget, order: PipelineSchedule, parts: Mapping[int, CapturedStage]) -> int:
    if stated.kind == "bytes":
        return int(stated.amount)
    if stated.kind != "share":
        raise UsageError(f"state a pipeline's budget in bytes or as a percentage, not as {stated.text!r}")
    problems = {number: part.problem for number, part in parts.items()}
    all_kept = {number: one.measured(no_recompute(one.graph)) for number, one in problems.items()}
    peaks = (
        rank_peak(order.actions[rank], [all_kept[s] for s in order.stage_of_rank[rank]])
        for rank in range(order.ranks)
    )
    return int(stated.amount * max(peaks))


def _rank_plan(
    order: PipelineSchedule, rank: int, parts: Mapping[int, CapturedStage], budget: int, asked: PlanOptions
) -> RankPlan:
    problems = [parts[s].problem for s in order.stage_of_rank[rank]]
    planner = stage_planner(asked.chosen(), asked.time_limit / len(problems))
    try:
        return RankSearch(problems, order.actions[rank], budget, planner, asked.time_limit).run()
    except InfeasibleBudget as error:
        raise InfeasibleBudget(f"rank {rank}", budget, error.smallest, error.known) from None


def _rank_plan_of(
    order: PipelineSchedule,
    rank: int,
    parts: Mapping[int, CapturedStage],
    budget: int,
    plans: Mapping[int, Mapping[str, Any]],
) -> RankPlan:
    """Return a rank's plans from plans that were made before.

    Raises:
        InfeasibleBudget: they exceed the budget.
    """
    mine = order.stage_of_rank[rank]
    own = tuple(plan_from_json(dict(plans[s]), parts[s].problem.graph) for s in mine)
    figures = tuple(parts[s].problem.measured(plan) for s, plan in zip(mine, own, strict=True))
    peak = rank_peak(order.actions[rank], figures)
    if peak > budget:
        raise InfeasibleBudget(f"rank {rank}", budget, peak)
    return RankPlan(figures, own, peak, sum(one.extra for one in figures), 0.0)
