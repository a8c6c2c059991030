"""A network of couplings between an embedding and a head, for dataflow pipelines; and its steps in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from one_process import (
    CUTS,
    data,
    distance,
    equal_losses,
    in_one_process,
    loss,
    measured,
    step_of,
    two_pipelines,
)
from torch import distributed, nn

import rematplan
from rematplan.models.coupling import Coupling
from rematplan.runtime.pipeline.dataflow_schedule import Updates, gradient_error_of
from rematplan.runtime.pipeline.random_seeds import Seeded


def branch(width: int, dropout: float) -> nn.Module:
    parts = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
    return nn.Sequential(*parts, *([nn.Dropout(dropout)] if dropout else []))


class Ordinary(nn.Module):
    """A layer that no inverse undoes, on two streams."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(self.first(a)), torch.relu(self.second(b))


class Flow(nn.Module):
    """``frozen``: blocks that are not trained. ``ordinary``: blocks that cannot be inverted."""

    def __init__(
        self,
        blocks: int = 8,
        width: int = 16,
        dropout: float = 0.0,
        frozen: tuple[int, ...] = (),
        ordinary: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, width), nn.Linear(2 * width, 1)
        self.blocks = nn.ModuleList(
            Ordinary(width) if k in ordinary else Coupling(branch(width, dropout), branch(width, dropout))
            for k in range(blocks)
        )
        for at in frozen:
            self.blocks[at].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = self.embed(x)
        for block in self.blocks:
            a, b = block(a, b)
        return self.head(torch.cat([a, b], -1))


def flow(seed: int = 0, **sizes: Any) -> Flow:
    torch.manual_seed(seed)
    return Flow(**sizes)


def planned(model: nn.Module, rows: int, **asked: Any) -> Any:
    given = {"stages": 4, "schedule": "dataflow", "costs": "roofline", "loss_memory": "3x", "cuts": CUTS}
    return rematplan.plan_pipeline(model, (data(rows)[0],), **(given | {"strategy": "reversible"} | asked))


_pipelines: dict[Any, tuple[Flow, dict[str, torch.Tensor], Any]] = {}


def planned_once(
    rank: int, rows: int, microbatches: int, sizes: dict[str, Any], plans: Any, budget: int
) -> tuple[Flow, Any]:
    """The network with its first weights and this rank's pipeline, which is planned once in a process."""
    key = rows, microbatches, tuple(sizes.items())
    if key not in _pipelines:
        model = flow(**sizes)
        first = {name: t.clone() for name, t in model.state_dict().items()}
        pipe = planned(model, rows, microbatches=microbatches, ranks=[rank], plans=plans, budget=budget)
        _pipelines[key] = model, first, pipe
    model, first, pipe = _pipelines[key]
    model.load_state_dict(first)
    model.zero_grad()
    return model, pipe


def stage_by_stage(model: Flow, step: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """The model's forward for a micro-batch, with the random numbers that the stages draw."""
    stages = [model.blocks[k : k + 2] for k in range(0, len(model.blocks), 2)]

    def forward(m: int, part: torch.Tensor) -> torch.Tensor:
        a = b = model.embed(part)
        for s, blocks in enumerate(stages):
            with Seeded(0, step, m, s):
                for block in blocks:
                    a, b = block(a, b)
        return model.head(torch.cat([a, b], -1))

    return forward


def run_flow(
    rank: int, rows: int, microbatches: int, sizes: dict[str, Any], steps: int = 1, **asked: Any
) -> dict[str, Any]:
    """Steps on this rank: how far its last gradients are from one process's, and the first step's peak."""
    model, pipe = planned_once(rank, rows, microbatches, sizes, **asked)
    (x, y), plain = data(rows), copy.deepcopy(model)
    (stage,) = stages = pipe.stages()
    schedule = pipe.schedule(stages, loss)
    losses: list[torch.Tensor] = []
    step = step_of(schedule, stages, (x,), y, losses)
    peak = measured(stages, step)
    one = in_one_process(plain, x, y, microbatches, stage_by_stage(plain, 0))
    for number in range(1, steps):
        model.zero_grad()
        plain.zero_grad()
        losses.clear()
        step()
        one = in_one_process(plain, x, y, microbatches, stage_by_stage(plain, number))
    theirs, mine = dict(plain.named_parameters()), dict(stage.submod.named_parameters())
    trained = {n: p.grad for n, p in mine.items() if p.grad is not None}
    return {
        "wrong": [distance(g, theirs[n].grad) for n, g in trained.items() if theirs[n].grad is not None],
        "missing": [n for n in mine if (n in trained) != (theirs[n].grad is not None)],
        "losses": equal_losses(losses, one),
        "peak": peak,
        "promise": pipe.ranks[rank].peak,
        "kept": stage.kept,
        "crossing": len(stage.code.crossing),
        "expected": gradient_error_of([(stage.error, stage.gain)] * 4),
    }


def train_flow(
    rank: int, rows: int, microbatches: int, steps: int, rate: float, every: int | None = None, **asked: Any
) -> dict[str, Any]:
    """A training on this rank: how far its weights are from one process's, and the drift of what is recovered."""
    model, pipe = planned_once(rank, rows, microbatches, {}, **asked)
    (x, y), plain = data(rows), copy.deepcopy(model)
    (stage,) = stages = pipe.stages()
    mine = dict(stage.submod.named_parameters())
    own = torch.optim.SGD(mine.values(), rate, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), rate, momentum=0.9)
    schedule = pipe.schedule(stages, loss, updates=Updates(every, own) if every else None)
    losses: list[torch.Tensor] = []
    step = step_of(schedule, stages, (x,), y, losses)
    for number in range(steps):
        step()
        if not every:
            own.step()
            own.zero_grad()
        in_one_process(plain, x, y, microbatches, stage_by_stage(plain, number))
        theirs.step()
        theirs.zero_grad()
    others = dict(plain.named_parameters())
    ours, one = (torch.cat([t[n].detach().flatten() for n in mine]) for t in (mine, others))
    wrong = distance(ours, one)
    return {"wrong": wrong, "drift": schedule.drift, "losses": [v.item() for v in losses]}


def run_data_parallel(rank: int, microbatches: int) -> list[float]:
    """Two dataflows of two ranks whose gradients are averaged; how far these are from one process's."""
    del rank
    mesh, batches, (x, y) = two_pipelines(16 * microbatches)
    model = flow()
    plain = copy.deepcopy(model)
    at = mesh["pipeline"].get_local_rank()
    asked = {"stages": 2, "cuts": ("blocks.4",), "budget": "1GiB", "ranks": [at]}
    pipe = planned(model, len(x), microbatches=microbatches, **asked)
    (stage,) = stages = pipe.stages(mesh["pipeline"])
    step_of(pipe.schedule(stages, loss), stages, (x,), y, [])()
    for p in stage.submod.parameters():
        distributed.all_reduce(p.grad, group=mesh["data"].get_group())
        p.grad.div_(2)
    in_one_process(plain, *batches, 2 * microbatches, stage_by_stage(plain, 0))
    theirs = dict(plain.named_parameters())
    return [distance(p.grad, theirs[n].grad) for n, p in stage.submod.named_parameters()]
