"""MobileNetV2: Sandler, Howard, Zhu, Zhmoginov, Chen, CVPR 2018, arXiv:1801.04381."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

ROWS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2 of the paper: (expansion, channels, blocks, stride of the first block)."""

STEM = 32
"""Channels of the first convolution in the paper. Other widths scale all channels by width ÷ 32."""
LAST = 1280


def round_channels(channels: float) -> int:
    """Round ``channels`` to the nearest multiple of 8, at least 8; if that is below 90 % of ``channels``, add 8."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def conv_norm(
    in_channels: int,
    out_channels: int,
    size: int,
    stride: int = 1,
    *,
    groups: int = 1,
    act: Callable[[], nn.Module] | None = None,
) -> nn.Sequential:
    """Return three layers: a convolution without bias, batch norm, and the activation that ``act`` makes, none if
    ``act`` is None. ``size``: the kernel's side, odd; with stride 1 the image size stays."""
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


def relu6() -> nn.Module:
    """Return an in-place ReLU6 layer, the activation of the MobileNetV2 paper."""
    return nn.ReLU6(inplace=True)


class InvertedResidual(nn.Module):
    """An inverted residual block: 1×1 to more channels (``expansion`` times), depthwise 3×3, 1×1. The input
    is added if shapes match.
    """

    def __init__(self, in_channels: int, out_channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        widen = [conv_norm(in_channels, hidden, 1, act=relu6)] if expansion > 1 else []
        self.body = nn.Sequential(
            *widen,
            conv_norm(hidden, hidden, 3, stride, groups=hidden, act=relu6),
            conv_norm(hidden, out_channels, 1),
        )
        self.added = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return features (N, ``out_channels``, H ÷ ``stride``, W ÷ ``stride``), rounded up, for features ``x`` (N,
        ``in_channels``, H, W)."""
        return cast(Tensor, x + self.body(x) if self.added else self.body(x))


class MobileNetV2(nn.Module):
    """MobileNetV2: from images (N, 3, H, W) to class scores (N, ``classes``). Channels scale with ``width``;
    the last are 1280 or more.
    """

    def __init__(self, width: int = STEM, classes: int = 1000) -> None:
        super().__init__()
        in_channels = round_channels(width)
        layers: list[nn.Module] = [conv_norm(3, in_channels, 3, 2, act=relu6)]
        for expansion, channels, count, stride in ROWS:
            out_channels = round_channels(channels * width / STEM)
            for block in range(count):
                layers.append(InvertedResidual(in_channels, out_channels, expansion, 1 if block else stride))
                in_channels = out_channels
        last = round_channels(LAST * max(1.0, width / STEM))
        layers += [conv_norm(in_channels, last, 1, act=relu6), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(last, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, H, W)."""
        return cast(Tensor, self.layers(x))
