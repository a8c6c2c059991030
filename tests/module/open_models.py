"""Models whose sizes vary, for the tests of captures with open sizes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Of(nn.Module):
    """A forward as a function of the module, whose parts are ``parts``, its weight ``w``, and the inputs."""

    def __init__(self, forward: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.function = nn.ModuleList(parts), forward
        self.w = nn.Parameter(torch.randn(WIDTH))

    def forward(self, *x: Tensor) -> Any:
        return self.function(self, *x)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, WIDTH))


def sequence(b: int, t: int) -> tuple[Tensor, ...]:
    return (torch.randn(b, t, WIDTH),)


def step_of(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    out = model(*batch)
    out.pow(2).sum().backward()
    return [out.detach()]
