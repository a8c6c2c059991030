"""DenseNet-121/161/169/201: Huang, Liu, van der Maaten, Weinberger, CVPR 2017, arXiv:1608.06993 (the BC form)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

DEPTHS: Mapping[int, tuple[int, tuple[int, ...]]] = MappingProxyType(
    {
        121: (32, (6, 12, 24, 16)),
        161: (48, (6, 12, 36, 24)),
        169: (32, (6, 12, 32, 32)),
        201: (32, (6, 12, 48, 32)),
    }
)
"""Table 1 of the paper: depth → (growth rate, layers of each block)."""

BOTTLENECK = 4
"""Channels of a layer's 1×1 convolution ÷ the growth rate."""


def norm_relu_conv(in_channels: int, out_channels: int, size: int) -> nn.Sequential:
    """Return batch norm, ReLU and a convolution without bias that keeps the image size. ``size``: the
    kernel's side, odd.
    """
    return nn.Sequential(
        nn.BatchNorm2d(in_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(in_channels, out_channels, size, padding=size // 2, bias=False),
    )


class DenseBlock(nn.Module):
    """A dense block: each of ``layers`` reads the input and all earlier outputs, of ``growth`` channels each,
    concatenated.
    """

    def __init__(self, layers: int, in_channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                norm_relu_conv(in_channels + i * growth, BOTTLENECK * growth, 1),
                norm_relu_conv(BOTTLENECK * growth, growth, 3),
            )
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and the outputs of all layers, concatenated:
        (N, ``in_channels`` + ``layers`` · ``growth``, H, W)."""
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """DenseNet: from images (N, 3, H, W) to class scores (N, ``classes``). ``depth``: a key of `DEPTHS`.

    ``width``: the channels of each layer's output; None means the paper's.
    """

    def __init__(self, depth: int = 121, width: int | None = None, classes: int = 1000) -> None:
        super().__init__()
        growth, blocks = DEPTHS[depth]
        growth = width or growth
        in_channels = 2 * growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, in_channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(in_channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for at, count in enumerate(blocks):
            layers.append(DenseBlock(count, in_channels, growth))
            in_channels += count * growth
            if at < len(blocks) - 1:
                layers += [norm_relu_conv(in_channels, in_channels // 2, 1), nn.AvgPool2d(2)]
                in_channels //= 2
        layers += [nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(in_channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, H, W)."""
        return cast(Tensor, self.head(self.features(x).flatten(1)))
