"""One of two processes of `test_two_processes`: trains under Lightning's DDP strategy, plainly and within a
budget, and compares.

usage: lightning_worker.py RANK PORT
"""

import logging
import os
import sys
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

import rematplan
from rematplan.integrations.lightning import RematplanCallback
from rematplan.plans.replicas import HeldByReplica

STEPS = 8


class Classifier(pl.LightningModule):
    """A network with dropout, whose loss is outside of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(3)
        )
        self.net = nn.Sequential(*blocks, nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _at: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(callbacks: list[Any], rank: int) -> Classifier:
    """Train on this process's half of a data set, whose last batches are smaller."""
    model, made = Classifier(), torch.Generator().manual_seed(0)
    data = torch.randn(1360, 16, generator=made), torch.randint(4, (1360,), generator=made)
    torch.manual_seed(rank)  # of the dropout
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    pl.Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=callbacks,
        **quiet,
    ).fit(model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=128))
    return model


def main() -> None:
    """Train both; say so if they end equal."""
    rank, port = int(sys.argv[1]), sys.argv[2]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    os.environ["NODE_RANK"] = "0"
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    options = {"strategy": "approx_dp", "costs": "roofline", "loss_memory": "3x", "refine": False}
    plain, planned = trained([], rank), trained([RematplanCallback("85%", **options)], rank)
    plans = rematplan.planning(planned.net).plans
    assert plans[0].estimate.reruns > 0
    assert all(plan.peak <= (plan.budget or 0) for plan in plans)
    reserved = planned.net.forward._rematplan.planner.options.reserved
    assert any(isinstance(one, HeldByReplica) for one in reserved.items)
    assert len(plain.losses) == STEPS
    assert planned.losses == plain.losses
    assert all(map(torch.equal, planned.state_dict().values(), plain.state_dict().values()))
    print("equal")
    sys.stdout.flush()
    os._exit(0)  # a thread of Gloo that frees a tensor while Python shuts down would abort the process


if __name__ == "__main__":
    main()
