"""RevNet for CIFAR (Gomez et al. 2017, arXiv:1707.04585): three stages of additive couplings between halves
of the channels.

Between stages a 1×1 convolution adds channels. The paper adds zeros, at which the gradient of ReLU jumps: a
zero recovered as 1e-9 would get another gradient.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rematplan.models.coupling import Coupling

BLOCKS = {38: 3, 110: 9}
"""For a depth, the couplings in each stage: 4 convolutions each, in 3 stages, plus the stem and the last layer."""
WIDTHS = {38: (2, 4, 7), 110: (2, 4, 8)}
"""For a depth, the channels of the three stages, as multiples of half the width: a width of 32 gives 32, 64, and 112 or
128."""
STRIDE = 4
"""Side of the image ÷ side of the last features."""


def residual(channels: int) -> nn.Sequential:
    """Return a sequence of batch norm, ReLU and a 3×3 convolution without bias, twice. It keeps the shape (N,
    ``channels``, H, W)."""
    layers: list[nn.Module] = []
    for _ in range(2):
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), conv]
    return nn.Sequential(*layers)


class HalvesBlock(nn.Module):
    """An additive coupling of the two halves of ``channels`` (even): a += F(b), then b += G(a). F and G have
    two 3×3 convolutions.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.coupling = Coupling(residual(channels // 2), residual(channels // 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, (N, ``channels``, H, W)."""
        a, b = x.chunk(2, 1)
        return torch.cat(self.coupling(a, b), 1)


class OrdinaryBlock(nn.Module):
    """Two ordinary residual blocks of ``channels``, with as many convolutions as the `HalvesBlock` that they
    replace.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.functions = nn.ModuleList(residual(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, (N, ``channels``, H, W)."""
        for function in self.functions:
            x = x + function(x)
        return x


class RevNet(nn.Module):
    """RevNet for CIFAR: from images (N, 3, H, W) to class scores (N, ``classes``). ``depth``: 38 or 110.

    ``reversible``: how many of the three stages, from the first, are couplings.
    """

    def __init__(self, depth: int = 38, width: int = 32, classes: int = 10, reversible: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        widths = [2 * max(1, width * w // 4) for w in WIDTHS[depth]]
        widths[0] = width
        self.stages = nn.ModuleList(
            nn.Sequential(
                *((HalvesBlock if i < reversible else OrdinaryBlock)(n) for _ in range(BLOCKS[depth]))
            )
            for i, n in enumerate(widths)
        )
        self.projections = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(a, b, 1, bias=False))
            for a, b in itertools.pairwise(widths)
        )
        self.norm, self.head = nn.BatchNorm2d(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, H, W)."""
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            x = stage(self.projections[i - 1](x) if i else x)
        return cast(Tensor, self.head(functional.relu(self.norm(x)).mean((2, 3))))
