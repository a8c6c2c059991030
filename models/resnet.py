"""ResNet-18/34/50/101/152 (He et al. 2016, arXiv:1512.03385). A bottleneck's strided convolution is the 3×3
one («v1.5»).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

from torch import Tensor, nn

DEPTHS: Mapping[int, tuple[bool, tuple[int, ...]]] = MappingProxyType(
    {
        18: (False, (2, 2, 2, 2)),
        34: (False, (3, 4, 6, 3)),
        50: (True, (3, 4, 6, 3)),
        101: (True, (3, 4, 23, 3)),
        152: (True, (3, 8, 36, 3)),
    }
)
"""Table 1 of the paper: for a depth, whether blocks are bottlenecks, and the blocks of each stage."""

EXPANSION = 4
"""Output channels of a bottleneck ÷ its inner channels."""


def conv(in_channels: int, out_channels: int, size: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the image size with stride 1. ``size``: the kernel's side, odd."""
    return nn.Conv2d(in_channels, out_channels, size, stride, size // 2 * dilation, dilation, bias=False)


def plain_body(in_channels: int, width: int, stride: int, dilation: int = 1) -> nn.Sequential:
    """Return the layers of a plain residual block, without the shortcut and the last ReLU: two 3×3
    convolutions with batch norm.
    """
    return nn.Sequential(
        conv(in_channels, width, 3, stride, dilation),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        conv(width, width, 3),
        nn.BatchNorm2d(width),
    )


def bottleneck_body(in_channels: int, width: int, stride: int, dilation: int = 1) -> nn.Sequential:
    """Return the layers of a bottleneck block, without the shortcut and the last ReLU, from ``in_channels``
    to 4 · ``width`` channels.

    ``stride``, ``dilation``: of the 3×3 convolution.
    """
    return nn.Sequential(
        conv(in_channels, width, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        conv(width, width, 3, stride, dilation),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        conv(width, EXPANSION * width, 1),
        nn.BatchNorm2d(EXPANSION * width),
    )


class Residual(nn.Module):
    """A residual block: relu(body(x) + shortcut(x)). The shortcut is a 1×1 convolution with batch norm if the
    shape changes.
    """

    def __init__(self, body: nn.Sequential, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return features (N, ``out_channels``, H ÷ ``stride``, W ÷ ``stride``), rounded up, for features ``x`` (N,
        ``in_channels``, H, W)."""
        return cast(Tensor, self.relu(self.body(x) + self.shortcut(x)))


class ResNet(nn.Module):
    """ResNet: from images (N, 3, H, W) to class scores (N, ``classes``). ``depth``: a key of `DEPTHS`. In stage i,
    from 0, 3×3 convolutions have ``width`` · 2^i channels."""

    def __init__(self, depth: int = 50, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        bottleneck, blocks = DEPTHS[depth]
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages, features = make_stages(bottleneck, blocks, width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, H, W)."""
        return cast(Tensor, self.head(self.pool(self.stages(self.stem(x))).flatten(1)))


def make_stages(
    bottleneck: bool, blocks: Sequence[int], width: int, *, stem: int | None = None, dilated: bool = False
) -> tuple[nn.Sequential, int]:
    """Return the residual stages of a ResNet, and the number of channels after the last stage.

    ``blocks``: of each stage. ``width``: inner channels of the first. ``stem``: input channels; None: ``width``.
    ``dilated``: from the third stage on, convolutions are dilated and keep the image size.
    """
    body, expansion = (bottleneck_body, EXPANSION) if bottleneck else (plain_body, 1)
    stages, in_channels = [], stem or width
    for stage, count in enumerate(blocks):
        inner, rows = width * 2**stage, []
        dilation = 2 ** (stage - 1) if dilated and stage > 1 else 1
        for block in range(count):
            stride = 2 if stage and not block and dilation == 1 else 1
            rows.append(
                Residual(body(in_channels, inner, stride, dilation), in_channels, expansion * inner, stride)
            )
            in_channels = expansion * inner
        stages.append(nn.Sequential(*rows))
    return nn.Sequential(*stages), in_channels
