"""Vision Transformer: Dosovitskiy et al., ICLR 2021, arXiv:2010.11929. The small one, ``vit_s``, has the sizes of
DeiT-S, arXiv:2012.12877."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from rematplan.models.transformer import Block, SelfAttention, heads_of

PATCH = 16
"""The side of a patch in pixels."""


class ViT(nn.Module):
    """Vision Transformer: from images (N, 3, ``image``, ``image``), a multiple of 16, to class scores (N,
    ``classes``).
    """

    def __init__(self, image: int = 224, depth: int = 12, width: int = 768, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image // PATCH) ** 2 + 1, width))
        heads = heads_of(width)
        self.blocks = nn.Sequential(*(Block(width, SelfAttention(width, heads)) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, ``image``, ``image``)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(patches.shape[0], -1, -1)
        mixed = self.blocks(torch.cat((first, patches), dim=1) + self.positions)
        return cast(Tensor, self.head(self.norm(mixed[:, 0])))
