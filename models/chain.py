"""A plain chain of a thousand layers or more. Orthogonal weights and tanh preserve the signal (Pennington et
al. 2017, arXiv:1711.04735).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class Chain(nn.Module):
    """A chain of ``depth`` linear layers with tanh, from features (N, ``width``) to class scores (N, ``classes``)."""

    def __init__(self, depth: int = 1000, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            product = nn.Linear(width, width)
            nn.init.orthogonal_(product.weight)
            nn.init.zeros_(product.bias)
            layers += [product, nn.Tanh()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for features (N, ``width``)."""
        return cast(Tensor, self.head(self.layers(x)))
