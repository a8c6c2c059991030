"""GoogLeNet (Szegedy et al. 2015, arXiv:1409.4842) with local response norm, without batch norm and auxiliary
classifiers.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

STAGES = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""Table 1 of the paper, one row per inception block, with channels of: the 1×1 branch; the 3×3 branch's 1×1 and 3×3
convolution; the 5×5 branch's 1×1 and 5×5 convolution; the pooling branch's 1×1 convolution."""

STEM = 64
"""Channels of the first convolution in the paper. Other widths scale all channels by width ÷ 64."""


def conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with bias, and ReLU; with stride 1 it keeps the image size. ``size``: the kernel's
    side, odd.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2), nn.ReLU(inplace=True)
    )


class Inception(nn.Module):
    """Four branches with different kernel sizes, whose channels are concatenated. ``row``: of `STAGES`, the
    branches' channels.
    """

    def __init__(self, in_channels: int, row: tuple[int, ...]) -> None:
        super().__init__()
        one, less_three, three, less_five, five, pooled = row
        self.branches = nn.ModuleList(
            [
                conv(in_channels, one, 1),
                nn.Sequential(conv(in_channels, less_three, 1), conv(less_three, three, 3)),
                nn.Sequential(conv(in_channels, less_five, 1), conv(less_five, five, 5)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv(in_channels, pooled, 1)),
            ]
        )
        self.out_channels = one + three + five + pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of the branches, (N, sum of the branches' channels, H, W).

        ``x``: an image (N, ``in_channels``, H, W).
        """
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class LocalResponseNorm(nn.Module):
    """Divides values by (1 + 10⁻⁴ · mean of squares in 5 neighbouring channels)^0.75 (Krizhevsky et al. 2012)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised features, of the same shape (N, C, H, W)."""
        # An ONNX export of PyTorch's own layer contains a branch on the shape.
        squares = functional.pad(x.square().unsqueeze(1), (0, 0, 0, 0, 2, 2))
        means = functional.avg_pool3d(squares, (5, 1, 1), stride=1)[:, 0]
        return x / (1.0 + 1e-4 * means).pow(0.75)


def halve() -> nn.MaxPool2d:
    """Return a 3×3 max pooling with stride 2, which halves height and width, rounded down."""
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


class GoogLeNet(nn.Module):
    """GoogLeNet: from images (N, 3, H, W) to class scores (N, ``classes``). All channels scale with ``width``."""

    def __init__(self, width: int = STEM, classes: int = 1000) -> None:
        super().__init__()

        def scaled(channels: int) -> int:
            return max(1, channels * width // STEM)

        layers: list[nn.Module] = [
            conv(3, scaled(64), 7, 2),
            halve(),
            LocalResponseNorm(),
            conv(scaled(64), scaled(64), 1),
            conv(scaled(64), scaled(192), 3),
            LocalResponseNorm(),
        ]
        in_channels = scaled(192)
        for stage in STAGES:
            layers.append(halve())
            for row in stage:
                block = Inception(in_channels, tuple(map(scaled, row)))
                layers.append(block)
                in_channels = block.out_channels
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(in_channels, classes)]
        self.layers = nn.Sequential(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(cast(Tensor, module.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, H, W)."""
        return cast(Tensor, self.layers(x))
