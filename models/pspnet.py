"""PSPNet on a dilated ResNet-101 (Zhao et al. 2017, arXiv:1612.01105), without the paper's auxiliary
classifier.

As in the authors' code, the ResNet begins with three 3×3 convolutions.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rematplan.models.resnet import DEPTHS, conv, make_stages

BINS = (1, 2, 3, 6)
"""The sides of the grids over which the pyramid pooling module takes means."""


def conv_norm_relu(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias, batch norm and ReLU; with stride 1 they keep the image size.
    ``size``: odd.
    """
    return nn.Sequential(
        conv(in_channels, out_channels, size, stride), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
    )


def enlarge(x: Tensor, like: Tensor) -> Tensor:
    """Resize ``x`` (N, C, h, w) bilinearly to (N, C, H, W), where H and W are the height and width of ``like``."""
    return functional.interpolate(x, like.shape[-2:], mode="bilinear", align_corners=True)


class Pyramid(nn.Module):
    """Concatenates ``features`` channels with their means over grids, whose sides are `BINS`; convolutions reduce
    each of these to a quarter of the channels."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), conv_norm_relu(features, features // len(BINS), 1))
            for side in BINS
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features with twice as many channels, (N, 2 ``features``, H, W), for ``x`` (N, ``features``, H, W)."""
        return torch.cat([x, *(enlarge(level(x), x) for level in self.levels)], dim=1)


class PSPNet(nn.Module):
    """PSPNet: from images (N, 3, H, W) to scores of each pixel (N, ``classes``, H, W). All channels scale
    with ``width``.
    """

    def __init__(self, width: int = 64, classes: int = 19) -> None:
        super().__init__()
        bottleneck, blocks = DEPTHS[101]
        self.stem = nn.Sequential(
            conv_norm_relu(3, width, 3, 2),
            conv_norm_relu(width, width, 3),
            conv_norm_relu(width, 2 * width, 3),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages, features = make_stages(bottleneck, blocks, width, stem=2 * width, dilated=True)
        self.head = nn.Sequential(
            Pyramid(features),
            conv_norm_relu(2 * features, features // 4, 3),
            nn.Dropout(0.1),
            nn.Conv2d(features // 4, classes, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of every pixel, (N, ``classes``, H, W), for images (N, 3, H, W)."""
        return enlarge(cast(Tensor, self.head(self.stages(self.stem(x)))), x)
