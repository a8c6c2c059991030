"""RevCol, tiny: Cai et al., «Reversible column networks», ICLR 2023, arXiv:2212.11696.

The network is a sequence of columns, each of four levels with fewer and fewer pixels. Level l of a column is F(level
l − 1 of the same column, level l + 1 of the previous column) + γ · (level l of the previous column). So the levels of
the previous column can be recovered from those of the next one, from the last level to the first: F reads only levels
that are known by then.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

COLUMNS = 4
BLOCKS = (2, 2, 4, 2)
"""The number of ConvNeXt blocks in each level."""
STRIDE = 32


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of features (N, C, H, W). The result has the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised features of the same shape, (N, C, H, W)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A ConvNeXt block: x + f(x), where f is a depthwise 3×3 convolution, layer norm over the channels, and two 1×1
    convolutions with GELU between them.

    ``width``: the number of input and output channels. Between the 1×1 convolutions there are 4 · ``width`` channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.function = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            ChannelNorm(width),
            nn.Conv2d(width, 4 * width, 1),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, (N, ``width``, H, W)."""
        return cast(Tensor, x + self.function(x))


class Level(nn.Module):
    """The function F of one level of a RevCol column. It reads the previous level of the same column and the next
    level of the previous column.

    ``width``: the number of output channels. ``below``: the channels of the previous level. If it equals ``width``,
    height and width are kept, else halved. ``above``: the channels of the next level of the previous column, or 0 if
    there is none. ``blocks``: the number of ConvNeXt blocks.
    """

    def __init__(self, width: int, below: int, above: int, blocks: int) -> None:
        super().__init__()
        self.down = (
            nn.Sequential(ChannelNorm(below), nn.Conv2d(below, width, 2, stride=2))
            if below != width
            else None
        )
        self.up = nn.Sequential(ChannelNorm(above), nn.Conv2d(above, width, 1)) if above else None
        self.blocks = nn.Sequential(*(ConvNeXt(width) for _ in range(blocks)))

    def forward(self, below: Tensor, above: Tensor | None) -> Tensor:
        """Return features (N, ``width``, H, W). Both arguments are projected to this shape and added; then the
        level's ConvNeXt blocks are applied.

        ``below``: features of the previous level of the same column, (N, C, 2H, 2W); for the first level, the output
        of the network's first convolution, (N, ``width``, H, W). ``above``: features of the next level of the
        previous column, (N, C, H ÷ 2, W ÷ 2); None if there are none.
        """
        x = below if self.down is None else self.down(below)
        if self.up is not None and above is not None:
            x = x + functional.interpolate(self.up(above), scale_factor=2.0, mode="nearest")
        return cast(Tensor, self.blocks(x))


class RevCol(nn.Module):
    """RevCol: a network from images (N, 3, H, W) to class scores (N, ``classes``). H and W must be multiples of 32.

    ``width``: channels of the first of the four levels of each column. They double from level to level.
    """

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        widths = [width << level for level in range(len(BLOCKS))]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), ChannelNorm(width))
        self.columns, self.scales = nn.ModuleList(), nn.ModuleList()
        for column in range(COLUMNS):
            above = [*widths[1:], 0] if column else [0] * len(widths)
            below = [width, *widths[:-1]]
            rows = zip(widths, below, above, BLOCKS, strict=True)
            self.columns.append(nn.ModuleList(Level(*row) for row in rows))
            if column:
                self.scales.append(nn.ParameterList(torch.full((n, 1, 1), 0.5) for n in widths))
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, H, W)."""
        stem = self.stem(x)
        before: list[Tensor] = []
        for i, column in enumerate(self.columns):
            levels: list[Tensor] = []
            for at, level in enumerate(cast(nn.ModuleList, column)):
                above = before[at + 1] if before and at + 1 < len(before) else None
                y = level(levels[-1] if levels else stem, above)
                if before:
                    y = y + cast(nn.ParameterList, self.scales[i - 1])[at] * before[at]
                levels.append(y)
            before = levels
        return cast(Tensor, self.head(self.norm(before[-1].mean((2, 3)))))
