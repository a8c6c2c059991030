"""U-Net (Ronneberger et al. 2015, arXiv:1505.04597). Unlike in the paper, convolutions are padded and have
batch norm.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import Tensor, nn

from rematplan.models.names import ZooError

LEVELS = 4
"""The number of poolings by two.

The sides of the image must be divisible by 2^LEVELS, so that skips have matching sizes.
"""


def double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return two 3×3 convolutions that keep the image size, each with batch norm and ReLU.

    ``in_channels``, ``out_channels``: the numbers of input and output channels.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """U-Net: from images (N, 3, H, W) to scores of each pixel (N, ``classes``, H, W); ZooError if 16 does not
    divide H and W.

    ``base``: channels at full resolution.
    """

    def __init__(self, base: int = 64, classes: int = 2) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(LEVELS + 1)]
        self.down = nn.ModuleList(
            double_conv(a, b) for a, b in zip([3, *widths[:-2]], widths[:-1], strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = double_conv(widths[-2], widths[-1])
        rising = list(reversed(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in itertools.pairwise(rising))
        self.merge = nn.ModuleList(double_conv(2 * b, b) for b in rising[1:])
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of every pixel, (N, ``classes``, H, W), for images (N, 3, H, W); ZooError if 16 does
        not divide H and W."""
        height, width = x.shape[-2:]
        if height % 2**LEVELS or width % 2**LEVELS:
            raise ZooError(
                f"U-Net needs sides divisible by {2**LEVELS}; the image is {int(height)}×{int(width)}"
            )
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat((skip, up(x)), dim=1))
        return cast(Tensor, self.head(x))
