"""Plans of tiny steps with chosen splits, against all schedules of all splits in 2 and 4 parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.options import PlanOptions
from rematplan.plans.planner import Planner
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.split.regions import find_regions
from rematplan.runtime.split.split_step import split_regions, splittable
from rematplan.runtime.split.sums_in_place import with_sums_in_place

MOST_STATES = 10**5


class Wide(nn.Module):
    """A wide layer, of which all can be split. ``squared``: the loss is computed from the sum of all, which is whole
    then."""

    def __init__(self, squared: bool) -> None:
        super().__init__()
        self.squared = squared
        self.a, self.b = nn.Linear(4, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total = self.b(self.a(x).tanh()).sum()
        return total.square() if self.squared else total


@pytest.mark.parametrize(
    ("squared", "share"), [*((True, share) for share in (1.0, 0.9, 0.65, 0.55)), (False, 0.9), (False, 0.65)]
)
def test_no_schedule_of_any_splits_is_cheaper(squared: bool, share: float) -> None:
    model, x = Wide(squared), torch.randn(64, 4)
    step = capture(model, (x,), "tiny")
    options = PlanOptions(
        budget="100%", costs="roofline", refine=False, strategy=rematplan.Auto(moves=3000), split="auto"
    )
    planner = Planner(options, dict(model.named_parameters()))
    regions = splittable(step, find_regions(step))
    forms = [with_sums_in_place(split_regions(step, dict.fromkeys(regions, k))) for k in (2, 4)]
    graphs = [planner.inverting_problem(one) for one in (step, *forms)]
    budget = int(share * no_recompute(graphs[0]).peak)
    found = [exhaustive(graph, budget, MOST_STATES) for graph in graphs]
    best = min(one.cost if one else math.inf for one in found)
    plan = replace(planner, options=replace(options, budget=str(budget))).plan(step).plan
    assert plan.peak <= budget
    assert plan.estimate.cost == pytest.approx(best)
