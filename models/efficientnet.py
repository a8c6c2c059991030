"""EfficientNet-B0: Tan, Le, ICML 2019, arXiv:1905.11946, with squeeze-and-excitation and stochastic depth."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rematplan.models.mobilenet import conv_norm, round_channels
from rematplan.models.transformer import DropPath

ROWS = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""Table 1 of the paper: (expansion, kernel, stride of the first block, channels, blocks)."""

STEM = 32
"""Channels of the first convolution in B0. Other widths scale all channels by width ÷ 32."""
LAST = 1280
DROP_PATH = 0.2
"""The rate of stochastic depth at the last block; it grows linearly from 0."""


def silu() -> nn.Module:
    """Return an in-place SiLU layer, the activation of the EfficientNet paper."""
    return nn.SiLU(inplace=True)


class SqueezeExcite(nn.Module):
    """Scales each of ``width`` channels by a function of all channels' means, with ``squeezed`` hidden
    features (Hu et al. 2018).
    """

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, squeezed, 1),
            silu(),
            nn.Conv2d(squeezed, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled features, of the same shape (N, ``width``, H, W)."""
        return cast(Tensor, x * self.gate(x))


class MBConv(nn.Module):
    """An inverted residual block with squeeze-and-excitation. The input is added if it has the result's shape.
    ``expansion``: hidden ÷ input channels. ``size``: the depthwise kernel's side, odd. ``drop``: the rate of stochastic
    depth."""

    def __init__(
        self, in_channels: int, out_channels: int, expansion: int, size: int, stride: int, drop: float
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        widen = [conv_norm(in_channels, hidden, 1, act=silu)] if expansion > 1 else []
        self.body = nn.Sequential(
            *widen,
            conv_norm(hidden, hidden, size, stride, groups=hidden, act=silu),
            SqueezeExcite(hidden, max(1, in_channels // 4)),
            conv_norm(hidden, out_channels, 1),
        )
        self.drop = DropPath(drop) if stride == 1 and in_channels == out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        """Return features (N, ``out_channels``, H ÷ ``stride``, W ÷ ``stride``), rounded up.

        ``x``: an image (N, ``in_channels``, H, W).
        """
        return cast(Tensor, self.body(x) if self.drop is None else x + self.drop(self.body(x)))


class EfficientNet(nn.Module):
    """EfficientNet-B0: from images (N, 3, H, W) to class scores (N, ``classes``). ``width``: channels of the first
    convolution, rounded to a multiple of 8; all others scale with it."""

    def __init__(self, width: int = STEM, classes: int = 1000) -> None:
        super().__init__()
        in_channels, total = round_channels(width), sum(row[-1] for row in ROWS)
        layers: list[nn.Module] = [conv_norm(3, in_channels, 3, 2, act=silu)]
        for expansion, size, stride, channels, count in ROWS:
            out_channels = round_channels(channels * width / STEM)
            for block in range(count):
                drop = DROP_PATH * (len(layers) - 1) / total
                layers.append(
                    MBConv(in_channels, out_channels, expansion, size, 1 if block else stride, drop)
                )
                in_channels = out_channels
        last = round_channels(LAST * width / STEM)
        layers += [conv_norm(in_channels, last, 1, act=silu), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(last, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, H, W)."""
        return cast(Tensor, self.layers(x))
