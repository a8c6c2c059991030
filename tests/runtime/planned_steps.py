"""Run a captured step as a schedule says, and compare it with plain autograd: what tests of the executor need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rematplan.ir import TrainingGraph
from rematplan.module.verification import Verification, run_once
from rematplan.module.verification import verify as compare
from rematplan.planner.core.lane_schedule import Lanes
from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.execute.compiled_plan import CompiledPlan
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import with_loss_boundary
from rematplan.runtime.problem.planning_problem import training_graph
from rematplan.runtime.problem.random_states import state_of


def problem(step: CapturedStep, costs: Mapping[str, CallCost]) -> TrainingGraph:
    """The planning problem of a step, with its loss boundary."""
    return with_loss_boundary(step, training_graph(step, costs))


def with_saves(graph: TrainingGraph, runs: Sequence[str]) -> list[str]:
    """``runs`` (names of ops) with, before the first run of each op that draws, the op that saves its state, if
    ``graph`` has one."""
    saved: set[str] = set()
    found: list[str] = []
    for name in runs:
        state = state_of(name)
        if state in graph.op and state not in saved:
            saved.add(state)
            found.append(state)
        found.append(name)
    return found


class PlannedStep:
    """A module's step as a schedule says. A call returns the loss, whose backward follows the schedule, too."""

    def __init__(
        self, module: nn.Module, step: CapturedStep, schedule: Schedule, lanes: Lanes | None = None
    ) -> None:
        self.module, self.compiled = module, CompiledPlan(step, schedule, lanes)

    def __call__(self, *batch: Tensor) -> Tensor:
        named = named_tensors(self.module)
        # A plan takes away the prefix of the module that a capture of a call puts around the model.
        return self.compiled({**{n.removeprefix("model."): t for n, t in named.items()}, **named}, batch)[0]

    @property
    def source(self) -> str:
        return self.compiled.halves.source


def verify(planned: Any, batch: Sequence[Tensor], seed: int = 0, predicted: float = 0.0) -> Verification:
    return compare(planned.module, planned, batch, seed, predicted)


def results(planned: PlannedStep, batch: Sequence[Tensor], seed: int = 11) -> list[Tensor]:
    """Loss, gradients, buffers and the random state after a step."""
    torch.manual_seed(seed)
    planned.module.zero_grad(set_to_none=True)
    loss = run_once(planned, batch)
    gradients = [p.grad for p in planned.module.parameters() if p.grad is not None]
    return [loss, *gradients, *planned.module.buffers(), torch.get_rng_state()]


def bound(step: CapturedStep, module: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """The values of a step's inputs by name; tangents are ones."""
    named = named_tensors(module)
    take = {
        "parameter": lambda i: named[i.target].detach(),
        "buffer": lambda i: named[i.target],
        "batch": lambda i: batch[int(i.target)],
        "constant": lambda i: step.constants[i.value],
        "tangent": lambda i: torch.ones(
            step.values[i.value].fake.shape, dtype=step.values[i.value].fake.dtype
        ),
    }
    return {i.value: take[i.kind](i) for i in step.inputs}
