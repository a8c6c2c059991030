"""The promised memory of a stage counts a result that is written into an operand once, where every run does so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import CPU, loss
from torch import nn

import rematplan
from rematplan.planner.core.schedule import Run
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.pipeline import action_lists
from rematplan.runtime.problem.loss_boundary import LOSS

ROWS, WIDTH = 4, 16


class Shift(nn.Module):
    """Ops whose backward reads at most their result, so that each can overwrite its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)  # a dimension of size 1 would be in no op
        return (torch.tanh(rows + self.shift).neg() + rows).unflatten(0, (-1, WIDTH))


def planned(rows: int = ROWS, schedule: str = "1f1b", **more: Any) -> rematplan.Pipeline:
    x = torch.zeros(2 * rows, WIDTH, WIDTH)
    asked = {"stages": 4, "cuts": "1,2,3", "microbatches": 4, "costs": "roofline", "strategy": "store_all"}
    model = nn.Sequential(*(Shift() for _ in range(4)))
    return rematplan.plan_pipeline(
        model, (x.repeat(2, 1, 1),), budget="100%", schedule=schedule, **asked | more
    )


def reuses(problem: StageProblem) -> tuple[bool, bool]:
    """Whether bytes are counted as reused in the forward, and in the backward."""
    schedule = no_recompute(problem.graph).schedule
    assert problem.reused is not None
    found, boundary = problem.reused(schedule), schedule.index(Run(LOSS))
    return any(found[:boundary]), any(found[boundary:])


@pytest.mark.parametrize("stage", [0, 1])
def test_a_micro_batch_needs_the_promised_bytes_exactly(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_lists, "SENT_OUTPUTS_ARE_FREED", False)  # the caller holds the output
    part = planned(ranks=[stage]).parts[stage]
    plan = no_recompute(part.problem.graph)
    figures, module = part.problem.measured(plan), part.planned(plan)
    shape = (ROWS, WIDTH, WIDTH)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(shape, requires_grad=stage > 0)
        return x, module(x)

    def step() -> None:
        _, out = forward()
        out.backward(torch.ones(shape))

    own = 4 * ROWS * WIDTH * WIDTH * (stage == 0)  # the caller keeps the inputs of the first stage
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks = [peak_above_entry(call, CPU)[0] - own for call in (forward, step)]
    assert peaks == [figures.transients.forward, max(figures.transients.forward, figures.transients.backward)]
    assert reuses(part.problem) == (True, True)
    twice = replace(part.problem, reused=None).measured(plan)
    assert peaks[0] < twice.transients.forward


@pytest.mark.parametrize(
    ("stage", "more", "backward"),
    [
        (3, {"loss_fn": loss, "target": torch.zeros(2 * 2 * ROWS, WIDTH, WIDTH)}, True),
        (3, {}, False),  # the gradients of an unknown loss may have any strides
        (3, {"loss_fn": lambda y, _: y.sum(), "target": torch.zeros(2 * 2 * ROWS)}, False),
        (1, {"replicas": 2}, False),  # so may those that pass a module around the stage
        (1, {"rows": 1}, True),
        (1, {"rows": 1, "schedule": "interleaved"}, True),
        (1, {"schedule": "zbv"}, True),
        (
            1,
            {"rows": 1, "schedule": "zbv"},
            False,
        ),  # the next stage, on the same rank, chooses a stride of that dimension
    ],
)
def test_the_backward_is_known_to_overwrite_only_if_gradients_have_the_captured_strides(
    stage: int, more: dict[str, Any], backward: bool
) -> None:
    assert reuses(planned(ranks=None, **more).parts[stage].problem) == (True, backward)


def test_numbers_among_arguments_are_in_the_promise_of_modelled_costs() -> None:
    """At the peak of the forward, an op multiplies a tensor that is kept by a number: it needs 12 bytes for this."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * 2

    model = nn.Sequential(Scaled(), nn.Linear(WIDTH, WIDTH))
    x = torch.zeros(8, WIDTH, requires_grad=True)
    asked = {"stages": 2, "cuts": "1", "microbatches": 2, "costs": "roofline", "strategy": "store_all"}
    part = rematplan.plan_pipeline(model, (x,), budget="100%", **asked).parts[0]
    plan = no_recompute(part.problem.graph)
    module, given = part.planned(plan), torch.zeros(4, WIDTH, requires_grad=True)
    peak, _ = peak_above_entry(lambda: module(given), CPU)
    assert 12 + 2 * given.nbytes == peak <= part.problem.measured(plan).transients.forward < peak + 12
