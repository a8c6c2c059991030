"""The U-Net of Stable Diffusion 1 (Rombach et al. 2022, arXiv:2112.10752): the noise in latents, from a time
and a text.

Weights that the authors initialise with zero are random, so that no first gradient is zero.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rematplan.models.transformer import CrossAttention

LATENT = 4
"""Channels of the latents."""
MULTIPLES = (1, 2, 4, 4)
"""For each level, its channels ÷ width. All levels except the last have attention."""
BLOCKS = 2
HEADS = 8
GROUPS = 32
"""The number of groups in group norms; the width must be divisible by it."""
CONTEXT = 768
"""Features of a text token if the width is 320."""


def norm_silu_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return group norm, SiLU and a 3×3 convolution that keeps the image size, in this order.

    ``in_channels``, ``out_channels``: the numbers of input and output channels.
    """
    return nn.Sequential(
        nn.GroupNorm(GROUPS, in_channels), nn.SiLU(), nn.Conv2d(in_channels, out_channels, 3, padding=1)
    )


class Residual(nn.Module):
    """A residual block of two convolutions; an embedding of the diffusion time (``time`` features) is added
    between them.
    """

    def __init__(self, in_channels: int, out_channels: int, time: int) -> None:
        super().__init__()
        self.first = norm_silu_conv(in_channels, out_channels)
        self.second = norm_silu_conv(out_channels, out_channels)
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, out_channels))
        self.shortcut = (
            nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return features (N, ``out_channels``, H, W) for ``x`` (N, ``in_channels``, H, W) and the time embedding (N,
        features)."""
        middle = self.first(x) + self.time(time)[:, :, None, None]
        return cast(Tensor, self.shortcut(x) + self.second(middle))


class GatedFeedForward(nn.Module):
    """A feed-forward layer with 4 · ``width`` hidden features, gated by as many others (GEGLU, Shazeer 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, (N, T, ``width``)."""
        value, gate = self.widen(x).chunk(2, dim=-1)
        return cast(Tensor, self.narrow(value * functional.gelu(gate)))


class Attending(nn.Module):
    """Attention between pixels (``width`` channels), to a text (``context`` features), and a feed-forward
    layer, each added to its input.
    """

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.inward, self.outward = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.pixels = CrossAttention(width, width, HEADS)
        self.text = CrossAttention(width, context, HEADS)
        self.mlp = GatedFeedForward(width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return features of the shape of ``x``, (N, ``width``, H, W). ``context``: the text, (N, T, features)."""
        y = self.inward(self.norm(x))
        rows, columns = y.shape[-2:]
        y = y.flatten(2).transpose(1, 2)
        z = self.norms[0](y)
        y = y + self.pixels(z, z)
        y = y + self.text(self.norms[1](y), context)
        y = y + self.mlp(self.norms[2](y))
        return cast(Tensor, x + self.outward(y.transpose(1, 2).unflatten(2, (rows, columns))))


class Level(nn.Module):
    """A residual block, then attention and a change of the size, if there are any."""

    def __init__(self, residual: Residual, attending: Attending | None, resize: nn.Module | None) -> None:
        super().__init__()
        self.residual, self.attending, self.resize = residual, attending, resize

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        """Return features (N, channels, H', W') of an image (N, channels, H, W), for a time (N, features) and
        a text (N, T, features).
        """
        x = self.residual(x, time)
        x = x if self.attending is None else self.attending(x, context)
        return x if self.resize is None else cast(Tensor, self.resize(x))


class Shrink(nn.Conv2d):
    """A 3×3 convolution with stride 2, which halves H and W, rounded up. It can be called like a `Level`."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, stride=2, padding=1)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        """Return features of half the height and width of ``x``. Further arguments are ignored."""
        return super().forward(x)


def grow(width: int) -> nn.Sequential:
    """Return layers that double height and width: nearest-neighbour upsampling and a 3×3 convolution.

    ``width``: the number of input channels, and of output channels.
    """
    return nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width, 3, padding=1))


class DiffusionUNet(nn.Module):
    """From latents (N, 4, H, W), times (N,) and a text (N, T, ``context``) to noise (N, 4, H, W).

    H and W must be divisible by 8, and ``width``, the first level's channels, by `GROUPS`.
    """

    def __init__(self, width: int = 320, context: int = CONTEXT) -> None:
        super().__init__()
        time, widths, lowest = 4 * width, [width * m for m in MULTIPLES], len(MULTIPLES) - 1
        exponents = torch.arange(width // 2) / (width // 2)
        self.register_buffer("frequencies", torch.exp(-math.log(10000.0) * exponents), persistent=False)
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.start = nn.Conv2d(LATENT, width, 3, padding=1)

        def level(
            in_channels: int, out_channels: int, attends: bool, resize: nn.Module | None = None
        ) -> Level:
            return Level(
                Residual(in_channels, out_channels, time),
                Attending(out_channels, context) if attends else None,
                resize,
            )

        self.down, skips, in_channels = nn.ModuleList(), [width], width
        for at, out_channels in enumerate(widths):
            for _ in range(BLOCKS):
                self.down.append(level(in_channels, out_channels, at < lowest))
                skips.append(in_channels := out_channels)
            if at < lowest:
                self.down.append(Shrink(in_channels))
                skips.append(in_channels)
        self.middle = nn.ModuleList(
            [level(in_channels, in_channels, True), level(in_channels, in_channels, False)]
        )
        self.up = nn.ModuleList()
        for at, out_channels in reversed(list(enumerate(widths))):
            for block in range(BLOCKS + 1):
                resize = grow(out_channels) if at and block == BLOCKS else None
                self.up.append(level(in_channels + skips.pop(), out_channels, at < lowest, resize))
                in_channels = out_channels
        self.end = norm_silu_conv(width, LATENT)

    def forward(self, x: Tensor, times: Tensor, context: Tensor) -> Tensor:
        """Return the noise (N, 4, H, W) in latents ``x`` (N, 4, H, W), at ``times`` (N,), for the text ``context`` (N,
        T, features)."""
        angles = times[:, None].to(x.dtype) * cast(Tensor, self.frequencies)
        time = self.time(torch.cat((angles.cos(), angles.sin()), dim=1))
        x = self.start(x)
        skips = [x]
        for level in self.down:
            skips.append(x := level(x, time, context))
        for level in self.middle:
            x = level(x, time, context)
        for level in self.up:
            x = level(torch.cat((x, skips.pop()), dim=1), time, context)
        return cast(Tensor, self.end(x))
