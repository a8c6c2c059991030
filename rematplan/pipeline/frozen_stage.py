"""A pipeline stage without gradients: its module runs as it is, and one run of its forward measures its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from rematplan.ir import ModelError, Op, Tensor, TrainingGraph, first_line
from rematplan.pipeline.captured_stages import StagePlace, stage_arguments
from rematplan.planner.core.plan import Plan
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.runtime.costs.measure import peak_and_rest_above_entry, wall_seconds
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.pipeline.stage_modules import StageModule
from rematplan.runtime.problem.loss_boundary import LOSS

STATES, RECEIVED, FORWARD, OUTPUTS = "(states)", "(received)", "(forward)", "(outputs)"
"""The names in the planning problem of the stage's parameters and buffers, of its inputs if another stage sends them,
of its forward, and of what the forward leaves allocated."""


@dataclass(frozen=True)
class FrozenStage:
    """A pipeline stage that computes no gradients. Its problem has one plan: the forward."""

    stage: StageModule
    problem: StageProblem

    def planned(self, plan: Plan, prepared: bool = True) -> nn.Module:
        """Return the stage's module itself. ``plan``, ``prepared``: ignored."""
        del plan, prepared
        return self.stage.module


def frozen_stage(number: int, stage: StageModule, template: StagePlan, place: StagePlace) -> FrozenStage:
    """Run the forward of a stage without gradients once, and return the stage with its memory; `ModelError` if it
    fails. Buffers and random states do not change."""
    device = stage.device
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda one: one.detach().zero_(), stage_arguments(stage)
    )
    buffers = {name: one.clone() for name, one in stage.module.named_buffers()}

    def forward() -> object:
        return functional_call(stage.module, buffers, args, kwargs)

    with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            peak, rest, _ = peak_and_rest_above_entry(forward, device)
            microseconds = 1e6 * wall_seconds(forward, device)
        except Exception as error:  # any error in the user's model is reported in one line
            reason = first_line(error)
            raise ModelError(f"the forward of stage {number} cannot be run: {reason}") from error
    received = template.messages.received
    states = sum(allocated(t.nbytes, device) for t in (*stage.module.parameters(), *stage.module.buffers()))
    graph = TrainingGraph(
        name=f"stage {number}",
        tensors=(Tensor(STATES, states), Tensor(RECEIVED, received), Tensor(OUTPUTS, rest), Tensor(LOSS, 0)),
        inputs=(STATES, RECEIVED),
        outputs=(OUTPUTS, LOSS),
        ops=(
            Op(FORWARD, (STATES, RECEIVED), (OUTPUTS,), microseconds, peak - rest, "forward"),
            Op(LOSS, (OUTPUTS,), (LOSS,), 0.0, 0, "backward"),
        ),
        never_rerun=(FORWARD, LOSS),
    )
    problem = StageProblem(
        graph,
        LOSS,
        states=(STATES,),
        per_microbatch=(RECEIVED,),
        between=place.copied - place.handed,
        freed={OUTPUTS: frozenset()} if place.freed and rest == template.messages.sent else {},
        template=template,
    )
    return FrozenStage(stage, problem)
