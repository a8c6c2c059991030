"""The additive coupling: Dinh et al., «NICE», 2014, arXiv:1410.8516; as residual blocks Gomez et al., NeurIPS 2017.

y₁ = x₁ + F(x₂), y₂ = x₂ + G(y₁), so x₂ = y₂ − G(y₁) and x₁ = y₁ − F(x₂). These are plain modules: nothing declares
that they can be inverted.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Coupling(nn.Module):
    """An additive coupling of two tensors: (a, b) becomes (a + F(b), b + G(a + F(b))). Both keep their shapes.

    ``first``, ``second``: the functions F and G.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return a + F(b), and b + G(a + F(b))."""
        a = a + self.first(b)
        return a, b + self.second(a)


class Couplings(nn.Module):
    """Additive couplings of two tensors, one after the other. ``blocks``: the couplings, in order."""

    def __init__(self, blocks: Iterable[Coupling]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two tensors after all couplings, of the shapes of ``a`` and ``b``."""
        for block in self.blocks:
            a, b = block(a, b)
        return a, b
