"""A decoder like Llama (Touvron et al. 2023): root-mean-square norms, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention (batch, tokens, ``width``) in which each of ``groups`` heads of keys and values serves several
    queries.

    ``heads``: the number of heads of queries, a multiple of ``groups``. ``tokens``: the largest length.
    """

    def __init__(self, width: int, heads: int, groups: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.queries = nn.Linear(width, width, bias=False)
        self.keys_values = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        angles = torch.outer(torch.arange(tokens), 10000 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cosines", angles.cos().repeat(1, 2))
        self.register_buffer("sines", angles.sin().repeat(1, 2))

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return cast(Tensor, x * self.cosines.to(x.dtype) + turned * self.sines.to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after attention, of the shape of ``x``, (batch, tokens, width)."""
        batch, tokens, width = x.shape
        q = self.queries(x).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k, v = self.keys_values(x).view(batch, tokens, 2 * self.groups, self.size).transpose(1, 2).chunk(2, 1)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (self._rotated(k), v))
        found = functional.scaled_dot_product_attention(self._rotated(q), k, v, is_causal=True)
        return cast(Tensor, self.out(found.transpose(1, 2).reshape(batch, tokens, width)))


class DecoderBlock(nn.Module):
    """A block of the decoder: attention, then a gated feed-forward network (SwiGLU), each added to its input.

    ``width``: the features of a token. ``heads``, ``groups``: the numbers of heads of queries, and of keys and values.
    ``tokens``: the largest length.
    """

    def __init__(self, width: int, heads: int, groups: int, tokens: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, groups, tokens)
        hidden = 8 * width // 3 // 64 * 64 or width
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after the block, of the shape of ``x``, (batch, tokens, width)."""
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return cast(Tensor, x + self.down(functional.silu(self.gate(y)) * self.up(y)))


class LlamaLike(nn.Module):
    """A decoder like Llama: from token numbers (batch, tokens) to scores of the next token (batch, tokens,
    ``vocabulary``).

    ``tokens``: the largest length. ``depth``: the number of blocks. ``width``: the features of a token. ``heads``,
    ``groups``: the numbers of heads of queries, and of keys and values.
    """

    def __init__(
        self, *, tokens: int, depth: int, width: int, heads: int, groups: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads, groups, tokens) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of the next token, (batch, tokens, vocabulary), for token numbers (batch, tokens)."""
        return cast(Tensor, self.head(self.norm(self.blocks(self.embedding(ids)))))
