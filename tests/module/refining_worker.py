"""One of two processes of `test_distributed` that get other plans at other steps: trains a model plainly and planned,
both in parallel, and compares.

usage: refining_worker.py RANK RENDEZVOUS_FILE
"""

import hashlib
import sys
from random import Random

import pytest
import torch
from elsewhere import Elsewhere, begin_with_the_leanest
from forks import gloo_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rematplan
from rematplan.plans import refining

STEPS = 20


class Network(nn.Module):
    """Convolutions, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1) for k in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.dropout(torch.relu(norm(convolution(x))), 0.1)
        return self.last(x.mean((2, 3)))


def main() -> None:
    """Train both; print the steps at which plans changed, the number of different plans, a hash of the weights."""
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    with gloo_rank(rank, 2, rendezvous), pytest.MonkeyPatch.context() as patch:
        draws, elsewhere = Random(rank), Elsewhere()
        x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(rank))
        patch.setattr(refining, "shared", lambda: elsewhere)
        begin_with_the_leanest(patch.setattr)
        planned = rematplan.plan_module(Network(), (x,), budget="90%", costs="roofline")
        models = {"plain": Network(), "planned": planned}
        parallel = {name: DistributedDataParallel(model) for name, model in models.items()}
        optimizers = {name: torch.optim.SGD(model.parameters(), 0.05, 0.9) for name, model in models.items()}
        plans, changes = [planned.plan.schedule], []
        for step in range(STEPS):
            if draws.random() < 0.3:
                # So that any plan counts as better.
                planned._rematplan.last.running.refinement._best = float("inf")
                elsewhere.find(rank=draws.randrange(8))
            losses = []
            for name, model in parallel.items():
                torch.manual_seed(100 * rank + step)
                optimizers[name].zero_grad()
                loss = nn.functional.cross_entropy(model(x), torch.arange(len(x)))
                loss.backward()
                optimizers[name].step()
                losses.append(loss.item())
            assert losses[0] == losses[1], step
            if planned.plan.schedule != plans[-1]:
                plans.append(planned.plan.schedule)
                changes.append(step)
        states = [model.state_dict() for model in models.values()]
        assert all(map(torch.equal, states[0].values(), states[1].values()))
        weights = b"".join(p.detach().numpy().tobytes() for p in planned.parameters())
        print(changes, len(set(plans)), hashlib.sha256(weights).hexdigest(), sep="|")


if __name__ == "__main__":
    main()
