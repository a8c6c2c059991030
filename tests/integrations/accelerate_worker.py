"""One of two processes of `test_two_processes`: trains a network whose layers `accelerate` shards by FSDP2,
plainly and within a budget, and compares.

usage: accelerate_worker.py RANK PORT
"""

import os
import sys
from collections.abc import Callable

import accelerate
import torch
from torch import Tensor, nn

import rematplan

STEPS = 8
SHARDED = accelerate.DistributedType.FSDP


class Block(nn.Module):
    """A layer with dropout, which `accelerate` shards by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1))


def trained(planned: Callable[[nn.Module, torch.optim.Optimizer], object], rank: int) -> list[Tensor]:
    """Train on batches of this process, and return the losses and its shards."""
    accelerate.state.AcceleratorState._reset_state()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    # By itself, accelerate shards on accelerators only.
    accelerator.state._shared_state |= {"distributed_type": SHARDED, "fsdp_plugin": plugin}
    accelerator.state.distributed_type = SHARDED
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    planned(model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(rank)
    losses = []
    for at in range(STEPS):
        x = torch.randn(96 - 32 * (at % 3 == 2), 16)
        loss = nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 4)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if planned is within_a_budget:
        plans = rematplan.planning(model).plans
        assert any(plan.estimate.reruns for plan in plans)
        assert all(plan.peak <= (plan.budget or 0) for plan in plans)
    return [*losses, *(p.detach().to_local() for p in model.parameters())]


def as_it_is(_model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Plan nothing."""


def within_a_budget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Plan the layers in place, before they are sharded."""
    quick = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    rematplan.apply(model, "240KiB", loss_memory="3x", reserved=[optimizer], **quick)


def main() -> None:
    """Train both; say so if they end equal."""
    rank, port = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    plain, planned = trained(as_it_is, int(rank)), trained(within_a_budget, int(rank))
    assert len(plain) == len(planned) > STEPS
    assert all(map(torch.equal, plain, planned))
    print("equal")
    sys.stdout.flush()
    os._exit(0)  # a thread of Gloo that frees a tensor while Python shuts down would abort the process


if __name__ == "__main__":
    main()
