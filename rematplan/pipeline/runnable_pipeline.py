"""`Pipeline`: a planned pipeline, and its stages and schedule as objects that PyTorch runs in each process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from rematplan.pipeline.data_parallel import check_precision
from rematplan.pipeline.dataflow import DataflowPart, dataflow_stages
from rematplan.pipeline.frozen_stage import FrozenStage
from rematplan.pipeline.schedules import SPLIT
from rematplan.pipeline.torch_stages import torch_stage
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.messages import CHANNELS, least_credits
from rematplan.planner.pipeline.rank_memory import in_flight, message_buffers
from rematplan.planner.pipeline.rank_search import RankPlan
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.runtime.graph.compat import PIPELINES_SEND_TO_THEMSELVES
from rematplan.runtime.pipeline.action_lists import TORCH_CLASSES
from rematplan.runtime.pipeline.dataflow_schedule import DataflowSchedule
from rematplan.runtime.pipeline.loss_storage import LossFunction, with_own_storage

CapturedPart = CapturedStage | DataflowPart | FrozenStage
"""A stage with its planning problem."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose stages follow plans: returned by `plan_pipeline`.

    ``order``: the schedule, with the actions (forwards and backwards of stages) of each rank. ``cuts``: the names of
    the modules with which the second and each later stage begin. ``budget``: the bytes that the peak of each rank must
    not exceed. ``parts``: captured stages, by stage number. ``ranks``: the plans of each planned rank's stages, by
    rank.
    """

    order: PipelineSchedule
    cuts: tuple[str, ...]
    budget: int
    parts: Mapping[int, CapturedPart]
    ranks: Mapping[int, RankPlan]

    @cached_property
    def stage_plans(self) -> tuple[StagePlan, ...]:
        """For each stage of the planned ranks, by number: memory (bytes), times (microseconds) and plan."""
        found = (one for rank in self.ranks.values() for one in rank.stages)
        return tuple(sorted(found, key=lambda one: one.stage))

    @property
    def peaks(self) -> dict[int, int]:
        """The predicted peak in bytes of each planned rank, by rank. It includes parameters, gradients and buffers for
        messages."""
        return {rank: plan.peak for rank, plan in self.ranks.items()}

    def modules(self, rank: int, prepared: bool = True) -> tuple[nn.Module, ...]:
        """Return modules that run the stages of a rank as planned. They share the model's parameters and buffers.

        Args:
            rank: a planned rank.
            prepared: whether the plans are compiled now; otherwise each is compiled in its module's first forward.

        Raises:
            UsageError: the schedule is ``dataflow``, whose stages run without autograd.
        """
        if self.order.name in CHANNELS:
            raise UsageError("stages of a dataflow run without autograd and are not modules; use stages()")
        parts = zip(
            (self.parts[s] for s in self.order.stage_of_rank[rank]), self.ranks[rank].plans, strict=True
        )
        return tuple(
            part.planned(plan, prepared) for part, plan in parts if not isinstance(part, DataflowPart)
        )

    def stages(
        self,
        mesh: DeviceMesh | ProcessGroup | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> list[Any]:
        """Return this process's stages as objects of `torch.distributed.pipelining`; for ``dataflow``, a list with its
        one `DataflowStage`.

        Args:
            mesh: a process group or a device mesh of one dimension, with the ranks of the pipeline; by default all
                processes.
            wrap: a function that takes a stage's planned module and returns the module to run, for example
                ``DistributedDataParallel(module)`` or ``fully_shard(module, mesh=mesh["data"])``. None: modules are not
                wrapped.

        Raises:
            UsageError: the number of processes differs from the number of ranks. With ``wrap``: the schedule is
                ``dataflow``, or it computes weight gradients separately, which PyTorch does differently in wrapped
                modules; or ``wrap`` gives FSDP2 a policy of mixed precision. With ``dataflow``: the backend is not
                gloo, or the stage is not on a CPU.
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
        for number, module in zip(
            self.order.stage_of_rank[rank], self.modules(rank, wrap is None), strict=True
        ):
            stage = self.parts[number].stage
            run = wrap(module) if wrap else module
            check_precision(number, run)
            made.append(torch_stage(stage, run, number, self.order.stages, group, split))
        return made

    def schedule(self, stages: Sequence[Any], loss_fn: LossFunction, **more: Any) -> Any:
        """Return an object whose method ``step`` runs a step: a schedule of PyTorch, or for ``dataflow`` a
        `DataflowSchedule`.

        Args:
            stages: this process's stages, from the method `stages`.
            loss_fn: computes the loss from the last stage's output and a micro-batch of targets.
            more: further arguments of the schedule's class, such as ``scale_grads``, or ``updates`` for ``dataflow``.

        Raises:
            UsageError: a rank has two consecutive stages, the backend is gloo, and PyTorch is older than 2.13, which
                cannot run that.
        """
        loss_fn = with_own_storage(loss_fn)
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
        """Return lines of text: for each rank and stage the micro-batches in flight, bytes and microseconds of
        recomputation, and for each rank its buffers and peak."""
        lines = [
            f"{self.order.name}, {self.order.microbatches} micro-batches, budget {show_bytes(self.budget)} a rank"
        ]
        for rank, plan in self.ranks.items():
            most = in_flight(self.order.actions[rank])
            for one in plan.stages:
                lines.append(
                    f"rank {rank} stage {one.stage}: {most[one.stage]} in flight, keeps {show_bytes(one.held.kept)}, "
                    f"transients {show_bytes(one.transients.most)}, states {show_bytes(one.standing.states)}, "
                    f"extra {one.times.extra:.1f} µs"
                )
            buffers = message_buffers(self.order.actions[rank], plan.stages)
            lines.append(f"rank {rank}: torch's buffers {show_bytes(buffers)}, peak {show_bytes(plan.peak)}")
        return "\n".join(lines)
