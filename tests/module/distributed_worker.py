"""One of two processes of `test_distributed`: trains a model plainly and as planned, both in parallel, and compares.

usage: distributed_worker.py RANK RENDEZVOUS_FILE
"""

import sys
from collections.abc import Callable

import torch
from forks import gloo_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rematplan

STEPS = 3
SETTINGS = {"budget": "92%", "strategy": "approx_dp", "costs": "roofline"}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Residual(nn.Module):
    """A residual block of convolutions and batch norms."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, 2, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, 2, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def whole(planned: bool, seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A network that is planned whole."""
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Residual(a, b) for a, b in ((3, 8), (8, 16))))
    model = nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return (rematplan.plan_module(model, (x,), **SETTINGS) if planned else model), x


def units(planned: bool, seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A network of which each unit is planned."""
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)), nn.Linear(32, 10))
    for at in range(2) if planned else ():
        model[at] = rematplan.plan_module(model[at], (x.clone().requires_grad_(),), **SETTINGS)
    return model, x


def data_parallel(model: nn.Module) -> nn.Module:
    """A copy of the weights in each process."""
    return DistributedDataParallel(model, broadcast_buffers=False)


def sharded(model: nn.Module) -> nn.Module:
    """A part of the weights in each process, gathered before the forward."""
    return fully_shard(model)


def planned_copies(model: nn.Module) -> nn.Module:
    """A copy of the weights in each process, planned in place after it is wrapped."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    rematplan.apply(wrapped.module, **SETTINGS)
    return wrapped


def planned_shards(model: nn.Module) -> nn.Module:
    """A part of the weights in each process, planned in place after it is sharded."""
    return rematplan.apply(fully_shard(model), **SETTINGS)


def sharded_units(model: nn.Module) -> nn.Module:
    """The same unit by unit; each gathers its weights again before its backward."""
    for unit in model[:-1]:
        fully_shard(unit, reshard_after_forward=True)
    return fully_shard(model)


HOW: dict[
    str, tuple[Callable[[bool, int], tuple[nn.Module, torch.Tensor]], Callable[[nn.Module], nn.Module]]
] = {
    "data_parallel": (whole, data_parallel),
    "sharded": (whole, sharded),
    "sharded_units": (units, sharded_units),
}


def train(model: nn.Module, x: torch.Tensor) -> list[float]:
    """Losses of some steps of gradient descent."""
    y = torch.arange(len(x)) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


IN_PLACE = {
    "copies, planned before": lambda model: data_parallel(rematplan.apply(model, **SETTINGS)),
    "copies, planned after": planned_copies,
    "shards, planned before": lambda model: sharded(rematplan.apply(model, **SETTINGS)),
    "shards, planned after": planned_shards,
}


def check_in_place(how: str, rank: int) -> None:
    """Train a model plainly and planned in place; say so if they end equal."""
    (plain, x), (planned, _) = whole(False, rank), whole(False, rank)
    parallel = data_parallel if "copies" in how else sharded
    assert train(parallel(plain), x) == train(IN_PLACE[how](planned), x)
    assert rematplan.planning(planned).plan.estimate.reruns > 0
    assert all(map(torch.equal, local(plain), local(planned)))
    print(f"{how}: equal")


def check_units_in_place(rank: int) -> None:
    """Train a model whose units are sharded one by one, plainly and with each unit planned in place; say so if they end
    equal."""
    (plain, x), (planned, _) = units(False, rank), units(False, rank)
    sharded_units(planned)
    for unit in planned[:-1]:
        rematplan.apply(unit, **SETTINGS)
    assert train(sharded_units(plain), x) == train(planned, x)
    assert all(rematplan.planning(unit).plan.estimate.reruns > 0 for unit in planned[:-1])
    assert all(map(torch.equal, local(plain), local(planned)))
    print("units, planned after: equal")


def local(model: nn.Module) -> list[torch.Tensor]:
    """What this process has of the state."""
    return [getattr(t, "_local_tensor", t) for t in model.state_dict().values()]


def check(how: str, rank: int) -> None:
    """Train both; say so if they end equal."""
    make, parallel = HOW[how]
    (plain, x), (planned, _) = make(False, rank), make(True, rank)
    plans = [m.plan for m in planned.modules() if hasattr(m, "plans")]
    assert plans
    assert all(plan.estimate.reruns > 0 for plan in plans)
    assert train(parallel(plain), x) == train(parallel(planned), x)
    assert all(map(torch.equal, local(plain), local(planned)))
    print(f"{how}: equal")


def main() -> None:
    """Check each way of running in parallel."""
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    with gloo_rank(rank, 2, rendezvous):
        for how in HOW:
            check(how, rank)
        for how in IN_PLACE:
            check_in_place(how, rank)
        check_units_in_place(rank)


if __name__ == "__main__":
    main()
