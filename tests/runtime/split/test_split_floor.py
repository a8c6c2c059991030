"""No choice of splits has a bound below the one of all splits."""

import pytest
import torch
from split_models import CASES, Decoder, captured, tokens
from torch import Tensor, nn

from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.plans.options import PlanOptions
from rematplan.plans.split_floor import split_floor
from rematplan.plans.step_problems import StepProblems
from rematplan.runtime.split.split_step import split_regions
from rematplan.runtime.split.sums_in_place import with_sums_in_place


class Normed(nn.Module):
    """Ops that end regions, of which one reads a view of what a region makes, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.back = nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(torch.tanh(self.norm(torch.tanh(self.wide(x)))))
        z = self.back(torch.tanh(self.wide(y)))
        return (y.sort(0).values + z).square().mean() + torch.tanh(self.wide(z))[:, :7].cumsum(0).mean()


MODELS = {
    **{name: CASES[name] for name in ("tied", "odd", "pixels")},
    "norms": lambda: (Normed(), (torch.randn(96, 16),)),
    "dropout": lambda: (Decoder(drops=0.5), tokens(2, 64)),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_splits_are_below_the_bound_of_all(name: str) -> None:
    torch.manual_seed(0)
    module, batch = MODELS[name]()
    step, regions = captured(module, batch)
    problems = StepProblems(PlanOptions(budget="min", costs="roofline"), dict(module.named_parameters()))
    whole = problems.inverting_problem(step)
    floor = split_floor(step, whole, regions)
    assert 0 < floor.bytes <= min_peak_bound(whole).bytes
    choices = [dict.fromkeys(regions, k) for k in (2, 16)] + [{regions[0]: 16}]
    for parts in choices:
        graph = problems.inverting_problem(with_sums_in_place(split_regions(step, parts)))
        assert floor.bytes <= min_peak_bound(graph).bytes
