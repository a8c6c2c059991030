"""Planned modules on two lanes: the bits of eager mode, and the budget."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import UsageError
from rematplan.runtime.costs.measure import peak_above_entry


class Deep(nn.Module):
    """Two outputs after a chain whose gradients leave in several segments."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(400, 400), nn.LayerNorm(400), nn.GELU(), nn.Dropout(0.1))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return x, x.exp().mean(1)


@pytest.mark.parametrize("blocks", [1, 5])
def test_a_planned_module_overlaps_in_every_segment(blocks: int) -> None:
    torch.manual_seed(0)
    model, x = Deep(blocks), torch.randn(96, 400)
    options = {"budget": "min", "costs": "roofline"}
    planned = rematplan.plan_module(
        copy.deepcopy(model), (x,), strategy=rematplan.ChenSqrt(two_lanes="on"), **options
    )
    if blocks > 1:
        assert planned.plan.lanes is not None
        assert planned.source.count("recovery.running") > 1
    for outputs in ((0, 1), (1,), (0,), (0, 1)):
        found = []
        for module in (model, planned):
            torch.manual_seed(2)
            module.zero_grad()
            given = module(x)
            sum(given[k].square().sum() for k in outputs).backward()
            found.append([*given, *(p.grad for p in module.parameters())])
        assert all(map(torch.equal, *found))
    assert "rematplan recovery" not in [t.name for t in threading.enumerate()]
    with pytest.raises(UsageError, match="auto: two_lanes is 'maybe'; it must be one of off, auto, on"):
        rematplan.plan_module(model, (x,), strategy=rematplan.Auto(two_lanes="maybe"), **options)


def test_a_planned_module_on_two_lanes_keeps_its_budget() -> None:
    torch.manual_seed(0)
    model, x = Deep(6), torch.randn(512, 400)
    lean = rematplan.plan_module(model, (x,), budget="min", strategy="chen_sqrt")
    budget = lean.plan.estimate.peak + 2**21
    planned = rematplan.plan_module(model, (x,), budget=budget, strategy=rematplan.ChenSqrt(two_lanes="on"))
    assert planned.plan.estimate.peak < planned.plan.lanes.peak <= budget

    def run() -> None:
        sum(t.sum() for t in planned(x)).backward()

    run()
    model.zero_grad()
    resident = sum(t.nbytes for t in (*model.parameters(), x))
    assert resident + peak_above_entry(run, torch.device("cpu"))[0] <= planned.plan.lanes.peak
