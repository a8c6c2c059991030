"""A model that reads attributes of its own, of a record and of its parts, for the tests of planned modules' state."""

import copy
import math
from collections import deque
from functools import cache

import torch
from same_bits import X, planned_and_plain
from torch import Tensor, nn


class Settings:
    """A record that modules read."""

    def __init__(self) -> None:
        self.scale, self.step = 2.0, 0


class Net(nn.Module):
    """Reads attributes of its own, of a record and of its parts."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(16)
        self.temperature, self.unread = 1.0, 0
        self.mask, self.settings = torch.ones(16), settings or Settings()
        self.recent = deque([1.0, 2.0])
        self.shape, self.weights, self.shift = (16,), {"masks": [2.0, torch.ones(())]}, 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.body(x))) * self.mask * self.recent[0]
        y = y * math.prod(self.weights["masks"]) + torch.full(self.shape, self.shift).element_size()
        return torch.tanh(y * self.settings.scale / self.temperature)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module) -> None:
    model(X).pow(2).sum().backward()


@cache
def _planned_net() -> tuple[nn.Module, nn.Module]:
    return planned_and_plain(net())


def copies_of_net() -> tuple[nn.Module, nn.Module]:
    """Copies of one planned network, with its plan, and of the network."""
    return copy.deepcopy(_planned_net())
