"""What kernels of the backward compute again, against all choices of small graphs."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rematplan.module.captures import capture_call
from rematplan.runtime.fuse.computed_again import computed_again
from rematplan.runtime.fuse.regions import Regions
from rematplan.runtime.graph.captured_step import CapturedStep


class Sized:
    """The part of a step that is read."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.storage_bytes = sizes


def computable(kept: set[str], operands: dict[str, list[str]], wanted: set[str]) -> bool:
    return all(s in kept or (s in operands and computable(kept, operands, set(operands[s]))) for s in wanted)


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_keeps_fewer_bytes(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"s{k}" for k in range(8)]
    sizes = {name: draw.choice([1, 4, 16, 64]) for name in names}
    operands = {
        name: draw.sample(names[:at], min(at, draw.randint(1, 2)))
        for at, name in enumerate(names)
        if at > 1 and draw.random() < 0.7
    }
    wanted, free = set(draw.sample(names[2:], 3)), set(draw.sample(names, 2))
    again = computed_again(cast(CapturedStep, Sized(sizes)), operands, sorted(wanted), free)

    kept: set[str] = set()
    stack = sorted(wanted)
    while stack:
        storage = stack.pop()
        if storage in again:
            stack += operands[storage]
        else:
            kept.add(storage)
    choices = (set(c) | free for n in range(len(names) + 1) for c in combinations(names, n))
    least = min(sum(sizes[s] for s in c - free) for c in choices if computable(c, operands, wanted))
    assert sum(sizes[s] for s in kept - free) == least


class Gated(nn.Module):
    """Its backward reads a sigmoid, which is computed from what the backward reads anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return self.last(y.sigmoid() * y).sum()


def test_a_kernel_of_the_backward_computes_a_sigmoid_again() -> None:
    step = capture_call(Gated(), (torch.randn(4, 8),), {})[1]
    found = Regions(step)
    regions = found.regions(found.find())
    backward = [r for r in regions if step.call[r.names[0]].backward]
    assert any("sigmoid" in c.name and not c.backward for r in backward for c in r.calls)
    assert not any("sigmoid" in value for r in backward for value in r.inputs)
    assert not any("sigmoid" in value for r in regions for value in r.outputs)
