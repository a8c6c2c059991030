"""Laws of what a training loop keeps in memory beyond a plan: one warning says how many bytes."""

import copy
import re
from functools import partial

import pytest
import torch
from same_bits import SETTINGS, same_grads
from torch import Tensor, nn

import rematplan
from rematplan.runtime.costs.measure import peak_above_entry


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU()))
        self.body, self.heads = nn.Sequential(*block), nn.ModuleList(nn.Linear(64, n) for n in (4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        return tuple(head(h) for head in self.heads)


def backwards(model: nn.Module, *, retained: bool) -> None:
    losses = [one.square().mean() for one in model(torch.randn(512, 64))]
    if retained:
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    else:
        sum(losses[1:], losses[0]).backward()


@pytest.mark.parametrize("modules", [None, ["body"]])
def test_a_retained_graph_is_told_once_with_its_bytes(
    modules: list[str] | None, recwarn: pytest.WarningsRecorder
) -> None:
    eager = TwoHeads()
    planned = rematplan.apply(copy.deepcopy(eager), modules=modules, **{**SETTINGS, "budget": "70%"})
    backwards(planned, retained=False)
    assert not recwarn.list
    peaks = list[int]()
    for _ in range(2):
        for model in (eager, planned):
            model.zero_grad()
            torch.manual_seed(0)
            peak, _ = peak_above_entry(partial(backwards, model, retained=True), torch.device("cpu"))
            peaks.append(peak)
        assert same_grads(eager, planned)
    (told,) = [str(one.message) for one in recwarn]
    assert "retain_graph" in told
    if modules is None:
        plan = rematplan.planning(planned).plan
        held = sum(t.nbytes for t in planned.parameters())
        needed = re.search(r"needs about ([\d.]+) MiB", told)
        assert needed is not None
        assert plan.budget < peaks[-1] + held <= 1.02 * float(needed[1]) * 2**20


def test_a_budget_with_room_for_a_retained_graph_is_not_exceeded(recwarn: pytest.WarningsRecorder) -> None:
    planned = rematplan.apply(TwoHeads(), **{**SETTINGS, "budget": "1GiB"})
    backwards(planned, retained=True)
    assert not recwarn.list


@pytest.mark.parametrize("calls", [1, 2])
def test_calls_that_would_share_cast_weights_are_told(calls: int, recwarn: pytest.WarningsRecorder) -> None:
    planned = rematplan.apply(nn.Linear(8, 8), **{**SETTINGS, "budget": "100%"})
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(planned(torch.randn(16, 8)).float().square().mean() for _ in range(calls))
        loss.backward()
    assert ["share the cast weights" in str(one.message) for one in recwarn].count(True) == calls - 1
