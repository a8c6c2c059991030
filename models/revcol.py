"""RevCol, tiny (Cai et al. 2023, arXiv:2212.11696): a sequence of columns, each of four levels with fewer and
fewer pixels.

Level l is F(level l − 1, the previous column's level l + 1) + γ · (its level l). So the previous column can
be recovered, from the last level to the first.
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
    """A ConvNeXt block with ``width`` channels: x + f(x), with a depthwise 3×3 convolution, layer norm, and
    two 1×1 convolutions with GELU.
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
    """The function F of one level of a column: ``below`` and ``above`` are the channels of what it reads.

    If ``below`` differs from ``width``, height and width are halved; ``above`` is 0 if there is none.
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
        """Return features (N, ``width``, H, W) of ``below`` (the same column's previous level) and ``above``
        (the previous column's next one, or None).
        """
        x = below if self.down is None else self.down(below)
        if self.up is not None and above is not None:
            # ``above`` has half the height and width.
            x = x + functional.interpolate(self.up(above), scale_factor=2.0, mode="nearest")
        return cast(Tensor, self.blocks(x))


class RevCol(nn.Module):
    """RevCol: from images (N, 3, H, W) to class scores (N, ``classes``), with H and W multiples of 32.

    ``width``: the first level's channels, which double from level to level.
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
