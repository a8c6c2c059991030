"""The additive coupling: y₁ = x₁ + F(x₂), y₂ = x₂ + G(y₁) (Dinh et al. 2014, NICE, arXiv:1410.8516).

These are plain modules: nothing declares that x₂ = y₂ − G(y₁) and x₁ = y₁ − F(x₂).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Coupling(nn.Module):
    """An additive coupling of two tensors with F = ``first`` and G = ``second``. Both keep their shapes."""

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
