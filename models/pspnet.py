"""PSPNet on a dilated ResNet-101: Zhao, Shi, Qi, Wang, Jia, CVPR 2017, arXiv:1612.01105.

It has the authors' stem of three convolutions; stages three and four are dilated instead of strided; scores are
enlarged to the size of the image. The auxiliary classifier, which has a separate loss, is left out.
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
    """Return a convolution without bias, batch norm and ReLU. With stride 1 it keeps the image size.

    ``in_channels``, ``out_channels``: the numbers of input and output channels. ``size``: the side of the kernel, odd.
    """
    return nn.Sequential(
        conv(in_channels, out_channels, size, stride), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
    )


def enlarge(x: Tensor, like: Tensor) -> Tensor:
    """Resize ``x`` (N, C, h, w) bilinearly to the height and width of ``like``: (N, C, H, W)."""
    return functional.interpolate(x, like.shape[-2:], mode="bilinear", align_corners=True)


class Pyramid(nn.Module):
    """The pyramid pooling module: concatenates features with their means over grids of 1, 2, 3 and 6 cells per side.

    ``features``: the number of input channels; each grid's means are projected to a quarter of it.
    """

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
    """PSPNet: a network from images (N, 3, H, W) to class scores of every pixel (N, ``classes``, H, W).

    ``width``: channels of the stem of the ResNet; all other channels scale with it (64 in the paper).
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
