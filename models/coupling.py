"""The additive coupling: Dinh et al., «NICE», 2014, arXiv:1410.8516; as residual blocks Gomez et al., NeurIPS 2017.

y₁ = x₁ + F(x₂), y₂ = x₂ + G(y₁), so that x₂ = y₂ − G(y₁) and x₁ = y₁ − F(x₂). Plain modules: nothing here says that
they can be inverted.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Coupling(nn.Module):
    """Two streams of one shape to two streams of that shape."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Each stream, with a function of the other added."""
        a = a + self.first(b)
        return a, b + self.second(a)


class Couplings(nn.Module):
    """One after the other."""

    def __init__(self, blocks: Iterable[Coupling]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The two streams after all of them."""
        for block in self.blocks:
            a, b = block(a, b)
        return a, b
