"""Models that are planned in parts, and what the tests of them share."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.module.plan_access import runner_of

WIDTH, ROWS = 16, 192


class Block(nn.Module):
    """A residual block. ``slope``: a setting that the forward reads."""

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__()
        self.slope = slope
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = functional.gelu(self.wide(self.norm(x)))
        return x + self.drop(self.back(functional.leaky_relu(wide, self.slope)))


class Base(nn.Module):
    """Blocks, and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x)), labels)


class Dropping(Base):
    """Layers that NumPy's draws leave out."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if np.random.uniform() >= 0.3:
                x = block(x)
        return x


class Matching(Base):
    """A loss that assigns labels to rows by values."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(x))
        taken: list[int] = []
        for row in (-logits[:4, labels[:3]]).detach().T.tolist():
            taken.append(min((i for i in range(len(row)) if i not in taken), key=row.__getitem__))
        return functional.cross_entropy(logits[taken], labels[:3]) + logits.square().mean()


ASKED: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "refine": False}


in_parts = partial(rematplan.apply, **ASKED)


def as_a_planned_module(model: nn.Module, budget: str) -> nn.Module:
    return rematplan.plan_module(model, batch(0), budget=budget, **ASKED)


def seeded(at: int) -> None:
    torch.manual_seed(at)
    np.random.seed(at)
    random.seed(at)


def batch(at: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(at)
    return torch.randn(rows, WIDTH, generator=made), torch.randint(5, (rows,), generator=made)


def run(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    made = model(x, labels)
    loss: Tensor = made if made.dim() == 0 else functional.cross_entropy(made, labels)
    loss.backward()
    return loss.detach()


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def same_steps(
    model: nn.Module, plain: nn.Module, steps: int, rows: Callable[[int], int] = lambda _: ROWS
) -> None:
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, plain)]
    for at in range(steps):
        losses = []
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            seeded(at)
            optimizer.zero_grad()
            losses.append(run(one, *batch(at, rows(at))))
        assert torch.equal(*losses)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name
        for optimizer in optimizers:
            optimizer.step()


def planned(model: nn.Module) -> Any:
    return runner_of(model).parts.last.plan
