"""VGG-19: Simonyan, Zisserman, ICLR 2015, arXiv:1409.1556 (configuration E), with the paper's dropout."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rematplan.models.names import ZooError

CONFIGURATION_E = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))
"""Stages of 3×3 convolutions, each ended by a 2×2 pooling: (channels ÷ width, number of convolutions)."""

STRIDE = 2 ** len(CONFIGURATION_E)
GRID = 7
"""The largest side of the classifier's input, which is that for a 224×224 image."""


def grid_side(image: int) -> int:
    """Return the side of the grid to which the last features are averaged: the largest divisor up to 7 of
    ``image`` ÷ 32.

    ZooError if ``image`` is below 32.
    """
    side = image // STRIDE
    if side < 1:
        raise ZooError(f"VGG-19 needs images of side {STRIDE} or more; the image is {image}×{image}")
    # A divisor, because ONNX has no adaptive pooling: 7 for 224, as in the paper; 4 for 256; 1 for 32.
    return max(s for s in range(1, GRID + 1) if side % s == 0)


class VGG(nn.Module):
    """VGG-19: from images (N, 3, ``image``, ``image``) to class scores (N, ``classes``). All features scale
    with ``width``.
    """

    def __init__(self, image: int = 224, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        side, layers, in_channels = grid_side(image), list[nn.Module](), 3
        for multiple, count in CONFIGURATION_E:
            for _ in range(count):
                layers += [nn.Conv2d(in_channels, multiple * width, 3, padding=1), nn.ReLU(inplace=True)]
                in_channels = multiple * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(side)
        hidden = 64 * width
        self.classifier = nn.Sequential(
            nn.Linear(in_channels * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )
        # Without batch norm, torch's default initialisation would halve the signal in each of the nineteen layers.
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(cast(Tensor, module.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (N, ``classes``) for images (N, 3, ``image``, ``image``)."""
        return cast(Tensor, self.classifier(self.pool(self.features(x)).flatten(1)))
