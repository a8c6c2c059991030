"""Tasks of gloo processes: pipelines of planned stages under PyTorch's schedules, against one process.

Each task takes a rank and returns plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from one_process import data, equal_losses, in_one_process, loss, measured, step_of, two_pipelines
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rematplan
from rematplan.planner.pipeline import rank_search
from rematplan.planner.pipeline.rank_search import RankSearchLimits
from rematplan.runtime.pipeline.stage_modules import stage_modules

ASKED: dict[str, Any] = {"costs": "roofline", "loss_fn": loss}
SCALE = 0.25
"""An argument that is no tensor."""
NAMED = {"scale": SCALE}
BLOCKS = 8
FEW = RankSearchLimits(grid=3, refined=2, lowered=2, cheaper=0)
"""Limits of a search that finds some plans, not the cheapest ones."""


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
    """Blocks between an embedding and a head.

    ``frozen``: blocks that need no gradients. ``skips``: pairs of blocks; the first one's output is added to the second
    one's input. ``outputs``: of each row.
    """

    def __init__(
        self,
        blocks: int = BLOCKS,
        width: int = 16,
        dropout: float = 0.0,
        frozen: tuple[int, ...] = (),
        embed: bool = True,
        skips: tuple[tuple[int, int], ...] = (),
        outputs: int = 1,
    ) -> None:
        super().__init__()
        self.skips = skips
        self.embed, self.head = nn.Linear(5, width), nn.Linear(width, outputs)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.embed.requires_grad_(embed)
        for at in frozen:
            self.blocks[at].requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        x = self.embed(x)
        outputs = []
        for at, block in enumerate(self.blocks):
            for first, second in self.skips:
                x = x + outputs[first] if second == at else x
            x = block(x, scale)
            outputs.append(x)
        return self.head(x)


def net(seed: int = 0, **more: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**more)


def planned(rows: int, sizes: dict[str, Any] | None = None, **asked: Any) -> Any:
    """The pipeline of a fresh network, in equal stages if no cuts are given."""
    stages = asked["stages"]
    each = (sizes or {}).get("blocks", BLOCKS) // stages
    cuts = tuple(f"blocks.{each * k}" for k in range(1, stages))
    x, y = data(rows)
    with patch.object(rank_search, "LIMITS", FEW):
        return rematplan.plan_pipeline(
            net(**(sizes or {})), (x,), NAMED, **ASKED | {"cuts": cuts, "target": y} | asked
        )


class Seeding(nn.Module):
    """Seeds the generator before each forward of a stage, by the step, the micro-batch and the stage."""

    def __init__(self, module: nn.Module, stage: int, microbatches: int) -> None:
        super().__init__()
        self.module, self.stage, self.microbatches, self.calls = module, stage, microbatches, 0

    def forward(self, *given: Any, **named: Any) -> Any:
        seed(*divmod(self.calls, self.microbatches), self.stage)
        self.calls += 1
        return self.module(*given, **named)


def seed(step: int, microbatch: int, stage: int) -> None:
    torch.manual_seed(1_000 * step + 10 * microbatch + stage)


def plain_forward(model: nn.Module, x: torch.Tensor, pipe: Any, step: int) -> Callable[..., torch.Tensor]:
    """The model's forward for a micro-batch, stage by stage, with the random numbers that the stages draw."""
    first = x.tensor_split(pipe.order.microbatches)[0]
    parts = [part.module for part in stage_modules(model, (first,), NAMED, pipe.cuts)]

    def forward(m: int, part: torch.Tensor) -> torch.Tensor:
        given: tuple[Any, ...] = (part,)
        for stage, module in enumerate(parts):
            seed(step, m, stage)
            given = (module(*given, **({} if stage else NAMED)),)
        return given[0]

    return forward


def run_step(
    rank: int, rows: int, steps: int = 1, rate: float = 0.0, sizes: dict[str, Any] | None = None, **asked: Any
) -> dict[str, Any]:
    """Run a pipeline that is planned already; what this rank's gradients, buffers and losses are beside one process's,
    and its peak in the first step.

    ``rate``: of the gradient descent after each step. ``asked``: arguments of `plan_pipeline`, with the plans.
    """
    model, plain = net(**(sizes or {})), net(**(sizes or {}))
    x, y = data(rows)
    pipe = rematplan.plan_pipeline(model, (x,), NAMED, ranks=[rank], target=y, **ASKED | asked)
    seeded = bool((sizes or {}).get("dropout"))
    microbatches = asked["microbatches"]
    stages = pipe.stages(wrap=(lambda module: Seeding(module, rank, microbatches)) if seeded else None)
    losses: list[torch.Tensor] = []
    step = step_of(pipe.schedule(stages, loss), stages, (x,), y, losses, **NAMED)
    peak = one = None
    sums: list[float] = []
    for number in range(steps):
        for p in (*model.parameters(), *plain.parameters()):
            if rate and p.grad is not None:
                p.data.sub_(rate * p.grad)
            p.grad = None
        losses.clear()
        peak = step() if number else measured(stages, step)
        sums.append(sum(v.item() for v in losses))
        forward = plain_forward(plain, x, pipe, number) if seeded else lambda _, part: plain(part, SCALE)
        one = in_one_process(plain, x, y, microbatches, forward)
    mine = {n for s in stages for n, _ in (*s.submod.named_parameters(), *s.submod.named_buffers())}
    mine = {n.removeprefix("module.") for n in mine}
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, plain))
    different = [
        n
        for n in mine
        if not torch.equal(ours[n], theirs[n])
        or (ours[n].grad is None) != (theirs[n].grad is None)
        or (ours[n].grad is not None and not torch.equal(ours[n].grad, theirs[n].grad))
    ]
    plan = pipe.ranks[rank]
    pairs = [(ours[n].grad, theirs[n].grad) for n in mine if ours[n].grad is not None]
    return {
        "different": different,
        "error": max((float((a - b).norm() / b.norm().clamp(1e-3)) for a, b in pairs), default=0.0),
        "losses": equal_losses(losses, one or []),
        "loss": sums[-1],
        "first loss": sums[0],
        "peak": peak,
        "promise": plan.peak,
        "extra": plan.extra,
    }


class Late(DistributedDataParallel):
    """Keeps what it broadcast for the last two forwards, as two threads of gloo do that are slow to free it."""

    def _sync_buffers(self) -> None:
        super()._sync_buffers()
        copies = [b.clone() for b in self.module.buffers() if b.is_floating_point()]
        self.late = [*getattr(self, "late", [])[-1:], copies]


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The weights in each process, their gradients reduced."""
    return Late(module, process_group=mesh.get_group(), find_unused_parameters=True)


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A part of the weights in each process, gathered for a step."""
    return fully_shard(module, mesh=mesh)


def sharded_in_bfloat16(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sharded, with parameters that are converted when they are gathered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def run_data_parallel(
    rank: int, rows: int, wrap: Callable[[nn.Module, DeviceMesh], nn.Module], **asked: Any
) -> dict[str, Any]:
    """Two pipelines of two ranks that share their gradients; the names of those that are not one process's."""
    del rank
    mesh, batches, (x, y) = two_pipelines(rows)
    model, plain, at = net(), net(), mesh["pipeline"].get_local_rank()
    pipe = rematplan.plan_pipeline(model, (x, SCALE), ranks=[at], target=y, **ASKED | asked)
    stages = pipe.stages(mesh["pipeline"], wrap=lambda module: wrap(module, mesh["data"]))
    step = step_of(pipe.schedule(stages, loss), stages, (x, SCALE), y, [])
    peak = measured(stages, step)
    if asked.get("replicas"):  # the buckets of gradients, made before the step
        peak += sum(p.nbytes for p in stages[0].submod.parameters() if p.requires_grad)
    forward = lambda _, part: plain(part, SCALE)  # noqa: E731
    in_one_process(plain, *batches, 2 * asked["microbatches"], forward)
    theirs = dict(plain.named_parameters())
    named = {n.removeprefix("module."): p.grad for n, p in stages[0].submod.named_parameters()}
    whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in named.items() if g is not None}
    return {
        "compared": len(whole),
        "different": [n for n, g in whole.items() if not torch.allclose(g, theirs[n].grad, 1e-5, 1e-7)],
        "peak": peak,
        "promise": pipe.ranks[at].peak,
    }
