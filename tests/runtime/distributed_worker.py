"""One of two processes of `test_distributed`: trains a model plainly and as planned, both under DDP, and compares.

usage: distributed_worker.py RANK RENDEZVOUS_FILE
"""

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import rematplan
from rematplan.models import build

STEPS = 20


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    x = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(rank))
    y = torch.arange(8)
    torch.manual_seed(0)
    plain = build("resnet18", image=64, width=8, classes=10)
    torch.manual_seed(0)
    planned = rematplan.plan_module(
        build("resnet18", image=64, width=8, classes=10),
        (x,),
        budget="85%",
        strategy="approx_dp",
        costs="roofline",
    )
    assert planned.plan.estimate.reruns > 0
    assert train(plain, x, y) == train(planned, x, y)
    assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))
    distributed.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
