"""What a stage sends is contiguous, whatever strides the model's tensors have, and its ops see the model's strides."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rematplan.runtime.pipeline.stage_modules import stage_modules

WIDTH = 8


class Transposing(nn.Module):
    """Each layer transposes: in the whole model, every second result is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Tanh() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x.transpose(1, 2))
        return x


class Patches(nn.Module):
    """Layers on patches of an image, whose results are transposed in memory, with a skip over two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 2, 2)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.patches(x).flatten(2).transpose(1, 2)
        for k, part in enumerate(self.parts):
            x = x + part(x if k != 2 else x + first)
        return x


class ChannelsLast(nn.Module):
    """Convolutions in the memory format ``channels_last``."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
            for c in (1, WIDTH, WIDTH, WIDTH)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Transposing, (WIDTH, WIDTH)), (Patches, (1, WIDTH, WIDTH)), (ChannelsLast, (1, WIDTH, WIDTH))],
)
def test_messages_are_contiguous_and_the_results_have_the_bits_of_the_model(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, *shape), kind()
    plain = copy.deepcopy(model)
    wanted = plain(x)
    given: tuple[torch.Tensor, ...] = (x,)
    passed = []
    stages = stage_modules(model, (x,), {}, [f"parts.{k}" for k in (1, 2, 3)])
    for stage in stages:
        own = tuple(t.detach().requires_grad_(t.requires_grad) for t in given)
        made = stage.module(*own)
        given = made if isinstance(made, tuple) else (made,)
        assert [t.shape for t in given] == [t.shape for t in stage.outputs]
        assert [t.stride() for t in given] == [t.stride() for t in stage.outputs]
        if stage is not stages[-1]:
            assert all(t.is_contiguous() for t in given)
        passed.append((own, given))
    (result,) = given
    assert torch.equal(result, wanted)
    assert result.stride() == wanted.stride()
    if not wanted.requires_grad:
        return
    (wanted * wanted).sum().backward()
    gradients: tuple[torch.Tensor | None, ...] = (2 * result.detach(),)
    for own, made in reversed(passed):
        torch.autograd.backward(made, gradients)
        gradients = tuple(t.grad for t in own)
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    for name, one in theirs.items():
        assert one.grad is not None
        assert torch.equal(ours[name].grad, one.grad), name
