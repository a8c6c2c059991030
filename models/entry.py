"""A row of the zoo: a network's name, its sizes, and how the network and a batch are made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from rematplan.models.errors import ZooError

SIZES = ("batch", "image", "tokens", "depth", "width", "classes", "vocabulary")
"""The names of sizes; each network has some of them.

``image``: side of the image in pixels. ``tokens``: length of the sequence. ``depth``: number of layers. ``width``:
channels, or features of a token.
"""

Sizes = Mapping[str, int]
"""Sizes by name."""

OutputKind = Literal["classes", "pixels", "tokens", "noise"]
"""The kind of output: scores for each image (N, C), pixel (N, C, H, W) or token (N, T, C); or noise of the input's
shape.
"""


def images(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Return random images (``batch``, 3, ``image``, ``image``)."""
    return (torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"], generator=generator),)


def rows(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Return random rows of features (``batch``, ``width``)."""
    return (torch.randn(sizes["batch"], sizes["width"], generator=generator),)


def tokens(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Return random token numbers (``batch``, ``tokens``) below ``vocabulary``."""
    shape = (sizes["batch"], sizes["tokens"])
    return (torch.randint(sizes["vocabulary"], shape, generator=generator),)


@dataclass(frozen=True)
class ZooEntry:
    """A network of the zoo.

    ``name``, ``summary``: its name, and one line about it. ``output``: the kind of its output. ``make``: returns the
    network of given sizes. ``sizes``: its sizes with their defaults. ``tiny``: sizes for a step that takes a moment.
    ``inputs``: returns a random batch from sizes and a generator. ``multiple``: for a size, the number that it must be
    a multiple of. ``least``: for a size, its least value if that is not 1. ``stride``: side of the image ÷ side of the
    smallest features, if the network has batch norm; else None. ``loss``: the usual loss.
    """

    name: str
    summary: str
    output: OutputKind
    make: Callable[[Sizes], nn.Module]
    sizes: Sizes
    tiny: Sizes
    inputs: Callable[[Sizes, Generator], tuple[Tensor, ...]] = images
    multiple: Sizes = field(default_factory=lambda: MappingProxyType({}))
    least: Sizes = field(default_factory=lambda: MappingProxyType({}))
    stride: int | None = None
    loss: str = "cross_entropy"

    def complete(self, requested: Mapping[str, int | None]) -> dict[str, int]:
        """Return all sizes by name: those requested, and the defaults for sizes that are missing or None.

        Raises:
            ZooError: the network does not have a requested size or cannot have its value; or batch norm would get a
                single value per channel.
        """
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
        least, multiple = self.least.get(name, 1), self.multiple.get(name, 1)
        if size < least or size % multiple:
            divisible = f" and divisible by {multiple}" if multiple > 1 else ""
            raise ZooError(f"{self.name}: {name} is {size}; it must be {least} or more{divisible}")
