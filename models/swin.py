"""Swin Transformer, tiny (Liu et al. 2021, arXiv:2103.14030): attention within square windows, shifted in
every second block.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from rematplan.models.names import ZooError
from rematplan.models.transformer import Block, DropPath, SelfAttention, heads_of

BLOCKS = (2, 2, 6, 2)
"""The number of blocks in each stage. From stage to stage the width doubles and the side halves."""
PATCH = 4
STRIDE = PATCH * 2 ** (len(BLOCKS) - 1)
WINDOW = 7
"""The largest side of a window, which is the paper's."""
HEAD = 32
DROP_PATH = 0.2
"""The rate of stochastic depth at the last block; it grows linearly from 0."""


def window_side(image: int) -> int:
    """Return the windows' side in tokens: the largest divisor up to 7 of ``image`` ÷ 32; ZooError if 32 does
    not divide ``image``.
    """
    side, rest = divmod(image, STRIDE)
    if rest or not side:
        raise ZooError(f"Swin needs images of a side divisible by {STRIDE}; the image is {image}×{image}")
    # It divides the sides of all stages: 7 for 224, as in the paper; 2 for 64.
    return max(w for w in range(1, WINDOW + 1) if side % w == 0)


class WindowAttention(nn.Module):
    """Self-attention within square windows of features (N, ``side``, ``side``, ``width``), with a learned bias per
    relative position.

    ``window``: the side of a window, a divisor of ``side``. ``shifted``: whether windows are moved by half of it, if
    there are several.
    """

    def __init__(self, width: int, side: int, window: int, shifted: bool) -> None:
        super().__init__()
        heads = heads_of(width, HEAD)
        self.attention = SelfAttention(width, heads)
        self.window = window
        self.shift = window // 2 if shifted and side > window else 0
        self.bias = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        nn.init.trunc_normal_(self.bias, std=0.02)
        self.register_buffer("relative", relative_positions(window), persistent=False)
        self.register_buffer("apart", apart(side, window, self.shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, (N, H, W, C)."""
        w, s = self.window, self.shift
        mask = self.bias[cast(Tensor, self.relative)].permute(2, 0, 1)  # heads × w² × w²
        if s:
            x = x.roll((-s, -s), (1, 2))
            mask = mask + cast(Tensor, self.apart)
        rows, columns = x.shape[1] // w, x.shape[2] // w
        cut = x.reshape(-1, rows, w, columns, w, x.shape[3]).transpose(2, 3)
        mixed = self.attention(cut.reshape(-1, rows * columns, w * w, x.shape[3]), mask)
        whole = mixed.reshape(-1, rows, columns, w, w, x.shape[3]).transpose(2, 3).reshape(x.shape)
        return cast(Tensor, whole.roll((s, s), (1, 2)) if s else whole)


def relative_positions(window: int) -> Tensor:
    """Return, for each pair of positions in a window of side w, the row of its difference in a table of (2w −
    1)²: (w², w²).
    """
    places = torch.cartesian_prod(torch.arange(window), torch.arange(window)).reshape(-1, 2)
    difference = places[:, None] - places[None] + window - 1
    return difference[..., 0] * (2 * window - 1) + difference[..., 1]


def apart(side: int, window: int, shift: int) -> Tensor:
    """Return the mask that is added to the scores in shifted windows, (windows, 1, w², w²): −100 or 0."""
    # A rolled window at the border has positions from opposite sides, which must not attend to each other.
    region = torch.zeros(side, dtype=torch.long)
    if shift:
        region[side - window :] = 1
        region[side - shift :] = 2
    regions = 3 * region[:, None] + region
    cut = regions.reshape(side // window, window, -1, window).transpose(1, 2).reshape(-1, window * window)
    return -100.0 * (cut[:, None, :, None] != cut[:, None, None, :]).float()


class Merge(nn.Module):
    """Concatenates 2 × 2 neighbours, then layer norm and a linear layer: (N, H, W, ``width``) to (N, H ÷ 2, W
    ÷ 2, 2 · ``width``).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the merged features, (N, H ÷ 2, W ÷ 2, 2 · ``width``), for features (N, H, W, ``width``)."""
        corners = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
        return cast(Tensor, self.reduce(self.norm(torch.cat(corners, dim=-1))))


class Swin(nn.Module):
    """Swin Transformer: from images (N, 3, ``image``, ``image``), a multiple of 32, to class scores (N,
    ``classes``).

    ``width``: the first stage's features, which double from stage to stage.
    """

    def __init__(self, image: int = 224, width: int = 96, classes: int = 1000) -> None:
        super().__init__()
        window, side = window_side(image), image // PATCH
        self.patches, self.start = nn.Conv2d(3, width, PATCH, stride=PATCH), nn.LayerNorm(width)
        layers: list[nn.Module] = []
        done = 0
        for stage, count in enumerate(BLOCKS):
            if stage:
                layers.append(Merge(width))
                width, side = 2 * width, side // 2
            for block in range(count):
                drop = partial(DropPath, DROP_PATH * done / (sum(BLOCKS) - 1))
                layers.append(Block(width, WindowAttention(width, side, window, block % 2 == 1), after=drop))
                done += 1
        self.layers, self.norm, self.head = (
            nn.Sequential(*layers),
            nn.LayerNorm(width),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, ``image``, ``image``)."""
        x = self.layers(self.start(self.patches(x).permute(0, 2, 3, 1)))
        return cast(Tensor, self.head(self.norm(x).mean(dim=(1, 2))))
