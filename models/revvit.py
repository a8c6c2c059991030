"""Reversible transformers (Mangalam et al. 2022, arXiv:2302.04869): a ViT, an encoder like RoBERTa, and a
Swin Transformer.

A block is a coupling of a, b, equal at first: a += attention(norm(b)), then b += mlp(norm(a)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rematplan.models.coupling import Coupling, Couplings
from rematplan.models.swin import BLOCKS, PATCH, Merge, WindowAttention, window_side
from rematplan.models.transformer import (
    DroppedAttention,
    SelfAttention,
    feed_forward,
    heads_of,
    small_normal_weights,
)
from rematplan.models.vit import PATCH as VIT_PATCH

DROPOUT = 0.1


def reversible_block(
    width: int, attention: nn.Module, after: Callable[[], nn.Module] = nn.Identity
) -> Coupling:
    """Return a pre-norm transformer block as an additive coupling of two tensors (..., ``width``).

    ``after``: makes a layer, such as dropout, for each addition.
    """
    return Coupling(
        nn.Sequential(nn.LayerNorm(width), attention, after()),
        nn.Sequential(nn.LayerNorm(width), feed_forward(width), after()),
    )


class RevViT(nn.Module):
    """A reversible ViT: from images (N, 3, ``image``, ``image``), a multiple of 16, to class scores (N,
    ``classes``).
    """

    def __init__(self, image: int = 224, depth: int = 12, width: int = 384, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, VIT_PATCH, stride=VIT_PATCH)
        self.positions = nn.Parameter(torch.empty(1, (image // VIT_PATCH) ** 2, width))
        nn.init.trunc_normal_(self.positions, std=0.02)
        heads = heads_of(width)
        self.blocks = Couplings(reversible_block(width, SelfAttention(width, heads)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, ``image``, ``image``)."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        x = torch.cat(self.blocks(x, x), -1)
        return cast(Tensor, self.head(self.norm(x).mean(1)))


class RevBERT(nn.Module):
    """A reversible BERT: from token numbers (N, T) to scores of each token (N, T, ``vocabulary``), with T ≤
    ``positions``.
    """

    def __init__(
        self, depth: int = 12, width: int = 768, vocabulary: int = 50265, positions: int = 514
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.start = nn.Sequential(nn.LayerNorm(width), nn.Dropout(DROPOUT))
        heads = heads_of(width)
        self.blocks = Couplings(
            reversible_block(width, DroppedAttention(width, heads, DROPOUT), lambda: nn.Dropout(DROPOUT))
            for _ in range(depth)
        )
        self.fuse = nn.Linear(2 * width, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        small_normal_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of every token of the vocabulary at each position, (N, T, ``vocabulary``), for token numbers
        (N, T)."""
        x = self.start(self.embedding(tokens) + self.positions.weight[: tokens.shape[1]])
        x = self.head(self.fuse(torch.cat(self.blocks(x, x), -1)))
        return functional.linear(x, self.embedding.weight, self.bias)


class RevSwin(nn.Module):
    """A reversible Swin Transformer: from images (N, 3, ``image``, ``image``), a multiple of 32, to class
    scores (N, ``classes``).

    ``width``: the first stage's features, which double from stage to stage.
    """

    def __init__(self, image: int = 224, width: int = 96, classes: int = 1000) -> None:
        super().__init__()
        window, side = window_side(image), image // PATCH
        self.patches, self.start = nn.Conv2d(3, width, PATCH, stride=PATCH), nn.LayerNorm(width)
        self.merges, self.stages = nn.ModuleList(), nn.ModuleList()
        for stage, count in enumerate(BLOCKS):
            if stage:
                self.merges.append(Merge(width))
                width, side = 2 * width, side // 2
            attentions = (WindowAttention(width, side, window, i % 2 == 1) for i in range(count))
            self.stages.append(Couplings(reversible_block(width, attention) for attention in attentions))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, ``image``, ``image``)."""
        x = self.start(self.patches(x).permute(0, 2, 3, 1))
        for i, stage in enumerate(self.stages):
            x = x if not i else self.merges[i - 1](x)
            a, b = stage(x, x)
            x = (a + b) / 2
        return cast(Tensor, self.head(self.norm(x).mean((1, 2))))
