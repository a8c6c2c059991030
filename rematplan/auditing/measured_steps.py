"""Peak and time of a step with its own checkpointing, without it, and with a plan."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rematplan.auditing.compiled import Context
from rematplan.auditing.step_runs import Step, restored
from rematplan.plan_any_module import plan_module
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.runtime.costs.measure import bytes_of, peak_above_entry, release_libraries, wall_seconds
from rematplan.runtime.graph.tensor_storages import plain_tensors

ROUNDS = 3
"""The number of timed steps, after an untimed one; the fastest counts."""
SECONDS = 5.0
"""The time limit of the search for a plan."""


@dataclass(frozen=True)
class Measured:
    """What one step needs: ``peak`` in bytes, parameters, buffers and inputs included; ``seconds``."""

    peak: int
    seconds: float


def measured(step: Step, path: Context = nullcontext) -> Measured:
    """Measure the peak of a step in the context ``path``, and its fastest time of `ROUNDS`, and restore the state."""

    def run() -> None:
        for model in step.models:
            model.zero_grad(set_to_none=True)
        step.run(args, kwargs)

    args, kwargs = step.fresh()
    with restored(step), path():
        run()  # a first step checks a plan, and libraries allocate workspaces
        for model in step.models:
            model.zero_grad(set_to_none=True)
        release_libraries(step.device)
        peak = _held_bytes(step) + peak_above_entry(run, step.device)[0]
        seconds = min(wall_seconds(run, step.device) for _ in range(ROUNDS))
    return Measured(peak, seconds)


def planned(step: Step, budget: int) -> Measured:
    """Plan the step with its loss within ``budget`` bytes or, if no plan fits, with the smallest peak found, and
    measure it."""
    with restored(step), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no plan of the user's: it is used here only
        planned_step = plan_module(
            _LossOf(step),
            step.args,
            step.kwargs,
            budget=f"{budget}B",
            strategy=Auto(time_limit=SECONDS),
            on_infeasible="least",
            refine=False,
        )
        return measured(
            Step(step.model, step.args, step.kwargs, lambda loss: loss, planned_step, step.autocast)
        )


class _LossOf(nn.Module):
    """A model whose output is its loss."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model, self.loss = step.model, step.loss
        self.train(step.model.training)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss(self.model(*args, **kwargs))


def _held_bytes(step: Step) -> int:
    """Return the bytes of parameters, buffers and inputs."""
    held = [*step.model.parameters(), *step.model.buffers(), *step.args, *step.kwargs.values()]
    return bytes_of(list(plain_tensors(held)))
