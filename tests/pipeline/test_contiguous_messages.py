"""What a stage returns can be sent, whatever strides the model's tensors have."""

from __future__ import annotations

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


def test_what_a_stage_returns_is_contiguous_as_messages_are() -> None:
    """The inputs of a stage are contiguous, so its results may have other strides than in the whole model."""
    x = torch.randn(2, WIDTH, WIDTH)
    model = Transposing()
    wanted = model(x)
    cuts = [f"parts.{k}" for k in (1, 2, 3)]
    for stage in stage_modules(model, (x,), {}, cuts):
        x = stage.module(x)
        assert x.is_contiguous()
    assert torch.equal(x, wanted)
