"""Attention and transformer blocks: Vaswani et al., NeurIPS 2017, arXiv:1706.03762.

Attention is PyTorch's fused ``scaled_dot_product_attention``. Sequences have the shape (..., tokens, width).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD = 64
"""The number of features per head in GPT-2, BERT and ViT."""


def heads_of(width: int, size: int = HEAD) -> int:
    """Return the number of heads for ``width`` features: the largest divisor that leaves each ``size`` or
    more, else 1.
    """
    return max(n for n in range(1, max(1, width // size) + 1) if width % n == 0)


def split(x: Tensor, heads: int) -> Tensor:
    """Split features into heads: (..., tokens, width) becomes (..., heads, tokens, width ÷ heads)."""
    return cast(Tensor, x.unflatten(-1, (heads, -1)).transpose(-2, -3))


def joined(x: Tensor) -> Tensor:
    """Join heads, the inverse of `split`: (..., heads, tokens, features) becomes (..., tokens, heads · features)."""
    return x.transpose(-2, -3).flatten(-2)


class SelfAttention(nn.Module):
    """Self-attention within sequences (..., tokens, ``width``). ``causal``: tokens attend to themselves and
    earlier ones alone.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.packed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the sequence after attention, in the shape of ``x``. ``mask``: added to scores (..., heads,
        tokens, tokens), or None.
        """
        q, k, v = (split(part, self.heads) for part in self.packed(x).chunk(3, dim=-1))
        return cast(Tensor, self.out(joined(self.mix(q, k, v, mask))))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return softmax(q kᵀ / √features + mask) v, of tensors (..., heads, tokens, features), causal if the
        layer is.
        """
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)


class DroppedAttention(SelfAttention):
    """Self-attention within sequences (..., tokens, ``width``), with dropout of the attention weights."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads)
        self.scale, self.dropout = (width // heads) ** -0.5, nn.Dropout(dropout)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return dropout(softmax(q kᵀ / √features + mask)) v, of tensors (..., heads, tokens, features)."""
        # Matrix products and softmax, because exporters leave out the dropout of PyTorch's fused attention.
        scores = q @ k.transpose(-1, -2) * self.scale
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return cast(Tensor, self.dropout(weights) @ v)


class CrossAttention(nn.Module):
    """Attention with queries from a sequence (N, T, ``width``), and keys and values from another (N, S, ``context``).
    Only the output layer has a bias."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context, width, bias=False)
        self.value = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return the result of attention, (N, T, ``width``), with queries from ``x`` (N, T, ``width``), and keys and
        values from ``context`` (N, S, features)."""
        parts = (self.query(x), self.key(context), self.value(context))
        q, k, v = (split(part, self.heads) for part in parts)
        return cast(Tensor, self.out(joined(functional.scaled_dot_product_attention(q, k, v))))


def feed_forward(width: int, gelu: str = "none") -> nn.Sequential:
    """Return linear layers from ``width`` to 4 · ``width`` to ``width``, with GELU between them. ``gelu``:
    ``none`` (exact) or ``tanh``.
    """
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A pre-norm transformer block for (..., tokens, ``width``): x + attention(norm(x)), then x + mlp(norm(x)).
    ``gelu``: as in `feed_forward`. ``after``: makes a layer, such as dropout, for each addition."""

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        *,
        gelu: str = "none",
        after: Callable[[], nn.Module] = nn.Identity,
    ) -> None:
        super().__init__()
        self.attention, self.mlp = attention, feed_forward(width, gelu)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.after = nn.ModuleList(after() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after the block, of the shape of ``x``, (..., tokens, ``width``)."""
        x = x + self.after[0](self.attention(self.norms[0](x)))
        return cast(Tensor, x + self.after[1](self.mlp(self.norms[1](x))))


class PostNormBlock(Block):
    """A transformer block with layer norm after each addition, as in BERT: norm(x + attention(x)), then norm(x +
    mlp(x)). It has the arguments of `Block`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after the block, of the shape of ``x``, (..., tokens, ``width``)."""
        x = self.norms[0](x + self.after[0](self.attention(x)))
        return cast(Tensor, self.norms[1](x + self.after[1](self.mlp(x))))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, a sample's branch is zero with probability ``rate``,
    else divided by 1 − ``rate``.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, branch: Tensor) -> Tensor:
        """Return ``branch`` (N, ...). In training mode it is zero for random samples, and divided by 1 − ``rate`` for
        the others."""
        ones = torch.ones((branch.shape[0],) + (1,) * (branch.dim() - 1), device=branch.device)
        return cast(Tensor, branch * self.dropout(ones.to(branch.dtype)))


def small_normal_weights(model: nn.Module) -> None:
    """Initialise linear layers and embeddings in place as GPT-2 and BERT do: normal with deviation 0.02, biases
    zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
