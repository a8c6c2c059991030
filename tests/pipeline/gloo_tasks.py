"""Functions that the gloo processes of the pipeline tests run: each takes a rank and returns plain data."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rematplan
from rematplan.ir import ProcessEnded
from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")


class Block(nn.Module):
    """A residual block with a batch norm, a dropout and a parameter that nothing reads."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.BatchNorm1d(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x))))) * scale


class Net(nn.Module):
    """Blocks between an embedding and a head; the frozen ones need no gradients."""

    def __init__(
        self,
        blocks: int = 8,
        width: int = 16,
        dropout: float = 0.0,
        frozen: tuple[int, ...] = (),
        embed: bool = True,
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.embed.requires_grad_(embed)
        for at in frozen:
            self.blocks[at].requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x)


def net(seed: int = 0, **more: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**more)


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 1, generator=generator)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def in_one_process(model: nn.Module, x: torch.Tensor, y: torch.Tensor, microbatches: int) -> list[float]:
    """One step of plain PyTorch with the same micro-batches; the losses."""
    losses = []
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        one = loss(model(part), target)
        one.backward()
        losses.append(one.item())
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(microbatches)
    return losses


def planned(rows: int, sizes: dict[str, Any] | None = None, **asked: Any) -> Any:
    """The pipeline of a fresh network."""
    return rematplan.plan_pipeline(
        net(**(sizes or {})), (data(rows)[0],), costs="roofline", loss_memory="3x", **asked
    )


def run_step(
    rank: int, rows: int, steps: int = 1, sizes: dict[str, Any] | None = None, **asked: Any
) -> dict[str, Any]:
    """Run a pipeline that is planned already; what this rank's gradients, buffers and losses are beside one process's,
    and its peak.

    ``asked``: arguments of `plan_pipeline`, with the plans.
    """
    model, plain = net(**(sizes or {})), net(**(sizes or {}))
    x, y = data(rows)
    pipe = rematplan.plan_pipeline(model, (x,), ranks=[rank], costs="roofline", loss_memory="3x", **asked)
    stages = pipe.stages()
    schedule = pipe.schedule(stages, loss)
    losses: list[torch.Tensor] = []
    states = sum(p.nbytes for s in stages for p in (*s.submod.parameters(), *s.submod.buffers()))

    def step() -> None:
        first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
        schedule.step(*((x,) if first else ()), **({"target": y, "losses": losses} if last else {}))

    peak, _ = peak_above_entry(step, CPU)
    one = in_one_process(plain, x, y, asked["microbatches"])
    for _ in range(steps - 1):
        for p in (*model.parameters(), *plain.parameters()):
            p.grad = None
        step()
        one = in_one_process(plain, x, y, asked["microbatches"])
    mine = {n for s in stages for n, _ in (*s.submod.named_parameters(), *s.submod.named_buffers())}
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, plain))
    different = [
        n
        for n in mine
        if not torch.equal(ours[n], theirs[n])
        or (ours[n].grad is None) != (theirs[n].grad is None)
        or (ours[n].grad is not None and not torch.equal(ours[n].grad, theirs[n].grad))
    ]
    plan = pipe.ranks[rank]
    return {
        "different": different,
        "losses": [v.item() for v in losses] == one if losses else None,
        "peak": peak + states,
        "promise": plan.peak,
        "extra": plan.extra,
    }


def run_data_parallel(rank: int, rows: int, **asked: Any) -> list[str]:
    """Two pipelines of two ranks that share their gradients; the names of those that are not one process's."""
    del rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    copy, at = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()
    model, plain = net(), net()
    batches = data(rows)
    x, y = (t.chunk(2)[copy] for t in batches)
    pipe = rematplan.plan_pipeline(model, (x,), ranks=[at], costs="roofline", loss_memory="3x", **asked)

    def parallel(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            module, process_group=mesh["data"].get_group(), find_unused_parameters=True
        )

    stages = pipe.stages(mesh["pipeline"], wrap=parallel)
    first, last = stages[0].is_first, stages[0].is_last
    pipe.schedule(stages, loss).step(*((x,) if first else ()), **({"target": y} if last else {}))
    in_one_process(plain, *batches, 2 * asked["microbatches"])
    theirs = dict(plain.named_parameters())
    return [
        name
        for name, p in stages[0].submod.module.named_parameters()
        if p.grad is not None and not torch.allclose(p.grad, theirs[name].grad, 1e-5, 1e-7)
    ]


def serve(rank: int, world: int, rendezvous: str, pipe: Any) -> None:
    """Run what comes through a pipe until it is closed."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    while True:
        try:
            function, more = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, **more)))
        except Exception as error:  # the test says it
            pipe.send((False, f"{type(error).__name__}: {error}"))
            if isinstance(error, ProcessEnded):  # so do programs whose neighbour has ended
                os._exit(1)
