"""One of two processes of `test_collectives`: trains a model whose forward communicates, plainly and as planned with a
budget of its own, and compares.

usage: collective_worker.py RANK RENDEZVOUS_FILE
"""

import copy
import faulthandler
import os
import sys

import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel

import rematplan

STEPS = 2
BUDGETS = ("99%", "min")
"""Of each process."""


class Branch(nn.Module):
    """Widens, shares with the other process, narrows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = distributed.group.WORLD
        h = nn.functional.dropout(torch.tanh(self.up(x)), 0.1, self.training)
        if self.kind == "sum":
            h = collectives.all_reduce(h, "sum", group)
        elif self.kind == "gather":
            h = collectives.all_gather_tensor_autograd(h, 0, group).unflatten(0, (2, -1)).mean(0)
        else:
            both = torch.cat([h, h.sin()])
            h = collectives.reduce_scatter_tensor_autograd(both, "sum", 0, group)
        return self.down(torch.tanh(h))


class Net(nn.Module):
    """Branches that may run in any order, but for what they share."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(kind) for kind in ("sum", "gather", "scatter"))
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + sum(branch(x) for branch in self.branches))


def train(model: nn.Module, x: torch.Tensor) -> list[float]:
    """Losses of some steps of gradient descent."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 10)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train both; say so if they end equal, and which order the plan communicates in."""
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    faulthandler.dump_traceback_later(120)  # where it waits, if it waits forever
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(32, 16, generator=torch.Generator().manual_seed(rank))
    planned = rematplan.plan_module(
        copy.deepcopy(plain),
        (x,),
        budget=BUDGETS[rank],
        costs="roofline",
        refine=False,
        strategy=rematplan.Auto(moves=500),
    )
    plan, step = planned.plan, planned._rematplan.last.unplanned.captured
    runs = [one.op for one in plan.schedule if hasattr(one, "op")]
    print(f"reruns {plan.estimate.reruns}")
    print(f"order {[op for op in runs if op in step.call and step.call[op].collective]}")
    parallel = [DistributedDataParallel(model, bucket_cap_mb=0.002) for model in (plain, planned)]
    assert train(parallel[0], x) == train(parallel[1], x)
    assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))
    print("equal")
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of Gloo that frees a tensor while Python shuts down would abort the process


if __name__ == "__main__":
    main()
