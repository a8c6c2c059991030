"""BERT and RoBERTa (Devlin et al. 2019, arXiv:1810.04805; Liu et al. 2019, arXiv:1907.11692), with the head
for masked tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rematplan.models.transformer import DroppedAttention, PostNormBlock, heads_of, small_normal_weights

DROPOUT = 0.1


class BERT(nn.Module):
    """BERT: from token numbers (N, T) to scores of each token (N, T, ``vocabulary``), with T ≤ ``positions``.
    ``kinds``: the number of segment embeddings, of which the first is used: 2 in BERT, 1 in RoBERTa."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 768,
        vocabulary: int = 30522,
        positions: int = 512,
        kinds: int = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.kinds = nn.Embedding(kinds, width)
        self.start = nn.Sequential(nn.LayerNorm(width), nn.Dropout(DROPOUT))
        heads = heads_of(width)
        self.blocks = nn.Sequential(
            *(
                PostNormBlock(
                    width, DroppedAttention(width, heads, DROPOUT), after=lambda: nn.Dropout(DROPOUT)
                )
                for _ in range(depth)
            )
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        small_normal_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores (N, T, ``vocabulary``) for token numbers (N, T)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]] + self.kinds.weight[0]
        x = self.head(self.blocks(self.start(x)))
        return functional.linear(x, self.embedding.weight, self.bias)
