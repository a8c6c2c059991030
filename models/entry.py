"""The entry of one network in the zoo: its name, its sizes, and functions that make it and a random batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from rematplan.models.names import SUMMARIES, ZooError

Sizes = Mapping[str, int]
"""Sizes by name."""

MOST_LAYERS = 10_000
"""The largest depth of a network. Each layer takes time and memory when the network is made, however small it is."""

IMAGENET = {"batch": 8, "image": 224, "width": 64, "classes": 1000}
"""The default sizes of networks for ImageNet."""
TINY = {"batch": 2, "image": 64, "width": 8, "classes": 10}
"""Small sizes of them."""

OutputKind = Literal["classes", "pixels", "tokens", "noise"]
"""The kind of output: scores for each image (N, C), pixel (N, C, H, W) or token (N, T, C); or noise of the input's
shape.
"""


def images(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Return a batch of random images (``batch``, 3, ``image``, ``image``); the names are keys of ``sizes``."""
    return (torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"], generator=generator),)


def rows(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Return a batch of random features (``batch``, ``width``); the names are keys of ``sizes``."""
    return (torch.randn(sizes["batch"], sizes["width"], generator=generator),)


def tokens(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Return random token numbers (``batch``, ``tokens``) below ``vocabulary``; the names are keys of ``sizes``."""
    shape = (sizes["batch"], sizes["tokens"])
    return (torch.randint(sizes["vocabulary"], shape, generator=generator),)


@dataclass(frozen=True)
class ZooEntry:
    """A network of the zoo, whose sizes are arguments."""

    name: str
    output: OutputKind
    """The kind of its output, such as ``"classes"``."""
    make: Callable[[Sizes], nn.Module]
    """Returns the network for sizes by name."""
    sizes: Sizes
    """The defaults, by name. The network has these sizes and no others."""
    tiny: Sizes
    """Small sizes, for which a training step takes little time."""
    inputs: Callable[[Sizes, Generator], tuple[Tensor, ...]] = images
    """Returns a random batch of inputs for sizes and a generator."""
    multiple: Sizes = field(default_factory=lambda: MappingProxyType({}))
    """What a size must be divisible by; absent if it is 1."""
    least: Sizes = field(default_factory=lambda: MappingProxyType({}))
    """The smallest valid value of a size, unless that is what it must be divisible by, or 1."""
    stride: int | None = None
    """Side of the image ÷ side of the smallest features, if the network has batch norm."""
    loss: str = "cross_entropy"
    """With which it is usually trained: ``"cross_entropy"`` or ``"mse"``."""

    @property
    def summary(self) -> str:
        """One line about the network."""
        return SUMMARIES[self.name]

    def complete(self, requested: Mapping[str, int | None]) -> dict[str, int]:
        """Return all sizes by name: those requested, and the defaults for sizes that are missing or None. `ZooError`
        for an unknown name or a size that the network cannot have."""
        stated = {name: size for name, size in requested.items() if size is not None}
        for name in stated:
            if name not in self.sizes:
                raise ZooError(f"{self.name} has no size {name}; it has {', '.join(self.sizes)}")
        sizes = {**self.sizes, **stated}
        for name, size in sizes.items():
            self._check(name, size)
        if self.stride and sizes["batch"] == 1 and sizes["image"] <= self.stride:
            raise ZooError(
                f"{self.name}: batch norm gets one value per channel at batch 1 and image {sizes['image']}; "
                f"training needs a batch of 2 or an image above {self.stride}"
            )
        return sizes

    def _check(self, name: str, size: int) -> None:
        multiple = self.multiple.get(name, 1)
        least = self.least.get(name, multiple)
        if size < least or size % multiple:
            divisible = f" and divisible by {multiple}" if multiple > 1 else ""
            raise ZooError(f"{self.name}: {name} is {size}; it must be {least} or more{divisible}")
        if name == "depth" and size > MOST_LAYERS:
            raise ZooError(f"{self.name}: {name} is {size}; it must be {MOST_LAYERS} or less")
