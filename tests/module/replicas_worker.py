"""One of two processes of `test_distributed`: trains replicas (DDP) of a model within budgets of bytes, and compares
bits with those of eager mode.

usage: replicas_worker.py RANK RENDEZVOUS_FILE
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy
import torch
from forks import gloo_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rematplan
from rematplan.runtime.costs.measure import _allocations

WIDTH, STEPS = 64, 4
SETTLED = 2
"""The steps before those whose peak is measured: DDP makes its buckets anew in the second one."""
OPTIONS: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "loss_memory": "3x", "refine": False}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Network(nn.Module):
    """Some blocks. Whether they are dropped by chance is decided by draws of NumPy, which no capture can follow."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.drops = drops
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not self.drops or numpy.random.uniform() >= 0:
                x = block(x)
        return self.head(x)


Wrap = Callable[..., DistributedDataParallel]
Prepare = Callable[[nn.Module, Wrap, dict[str, Any], torch.Tensor], nn.Module]


def planned_before(model: nn.Module, wrap: Wrap, options: dict[str, Any], x: torch.Tensor) -> nn.Module:
    """Plan in place, then wrap."""
    del x
    return wrap(rematplan.apply(model, **options))


def planned_module(model: nn.Module, wrap: Wrap, options: dict[str, Any], x: torch.Tensor) -> nn.Module:
    """Make a planned module, whose plan knows no buckets, then wrap."""
    return wrap(rematplan.plan_module(model, (x,), **options))


def trained(
    model: nn.Module, prepare: Callable[[nn.Module], nn.Module], x: torch.Tensor, every: int
) -> tuple[list[Any], int]:
    """Return losses and weights, and the peak of all that training holds."""
    numpy.random.seed(0)
    optimizer = torch.optim.Adam(model.parameters())
    wrapped, labels, losses, peak = prepare(model), torch.arange(len(x)) % 10, [], 0
    weights = sum(p.nbytes for p in model.parameters())
    for at in range(STEPS * every):
        # Weights, buckets, Adam's states
        resident = 4 * weights if at >= SETTLED * every else 0
        views = wrapped.gradient_as_bucket_view
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None and not views)
        with _allocations() as sizes:
            loss = nn.functional.cross_entropy(wrapped(x), labels)
            loss.backward()
            if at % every == every - 1:
                optimizer.step()
        if at % every == every - 1:
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        if resident:
            peak = max(peak, resident + gradients + x.nbytes + labels.nbytes + max(accumulate(sizes)))
    return [*losses, *(p.detach() for p in model.parameters())], peak


CASES: dict[str, tuple[Prepare, dict[str, Any], dict[str, Any]]] = {
    "in place": (planned_before, {}, {}),
    "a planned module": (planned_module, {}, {}),
    "a percentage": (planned_module, {}, {"budget": "85%"}),
    "views": (planned_before, {"gradient_as_bucket_view": True}, {}),
    "summed": (planned_before, {}, {"every": 2}),
    "parts": (planned_before, {}, {"drops": True, "share": 1.06}),
}


def check(name: str, rank: int) -> None:
    """Train a case plainly, and within a share of its peak; say so if the ends are equal and the budget is kept."""
    prepare, keywords, how = CASES[name]
    every, x = how.get("every", 1), torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(rank))
    wrap = partial(DistributedDataParallel, **keywords)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return Network(how.get("drops", False))

    plain, most = trained(network(), wrap, x, every)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    reserved = [optimizer, *["gradients"] * (every > 1)]
    budget = how.get("budget", int(how.get("share", 0.85) * most))
    options = {"budget": budget, "reserved": reserved, **OPTIONS}
    made = []

    def prepared(one: nn.Module) -> nn.Module:
        made.append(prepare(one, wrap, options, x))
        return made[0]

    found, peak = trained(model, prepared, x, every)
    assert all(map(torch.equal, map(torch.as_tensor, plain), map(torch.as_tensor, found)))
    if isinstance(budget, str):
        budget = rematplan.planning(made[0].module).plan.budget
        alone = rematplan.planning(rematplan.plan_module(network(), (x,), **options)).plan.budget
        buckets = sum(p.nbytes for p in model.parameters())
        assert budget - alone >= int(0.85 * buckets), f"{name}: {budget} bytes do not count the buckets"
    assert peak <= budget, f"{name}: {peak} bytes exceed {budget}"
    print(f"{name}: kept")


def main() -> None:
    """Check each case."""
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    with gloo_rank(rank, 2, rendezvous):
        for name in CASES:
            check(name, rank)


if __name__ == "__main__":
    main()
