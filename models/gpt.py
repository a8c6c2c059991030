"""GPT-2 (Radford et al. 2019): pre-norm blocks, fused causal attention and tied weights, without the paper's
dropout.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from rematplan.models.transformer import Block, SelfAttention, heads_of, small_normal_weights


class GPT(nn.Module):
    """GPT-2: from token numbers (N, T) to scores of the next token (N, T, ``vocabulary``), with T ≤ ``tokens``."""

    def __init__(
        self, depth: int = 12, width: int = 768, vocabulary: int = 50257, tokens: int = 1024
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width)
        heads = heads_of(width)
        self.blocks = nn.Sequential(
            *(Block(width, SelfAttention(width, heads, causal=True), gelu="tanh") for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        small_normal_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of the next token, (N, T, ``vocabulary``), for token numbers (N, T)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.embedding.weight)
