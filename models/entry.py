"""What the zoo says of a network: its sizes, how it is made from them, and what goes into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from rematplan.models.errors import ZooError

SIZES = ("batch", "image", "tokens", "depth", "width", "classes", "vocabulary")
"""The sizes that networks have; each has some of them.

``image``: side of the image, pixels. ``tokens``: length of the sequence. ``depth``: layers. ``width``: channels, or
features of a token.
"""

Sizes = Mapping[str, int]
"""Sizes by name."""

OutputKind = Literal["classes", "pixels", "tokens", "noise"]
"""What comes out: scores for each image (N, C), pixel (N, C, H, W) or token (N, T, C); or noise like the input."""


def images(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Images (``batch``, 3, ``image``, ``image``)."""
    return (torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"], generator=generator),)


def rows(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Rows of features (``batch``, ``width``)."""
    return (torch.randn(sizes["batch"], sizes["width"], generator=generator),)


def tokens(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Token numbers (``batch``, ``tokens``) below ``vocabulary``."""
    shape = (sizes["batch"], sizes["tokens"])
    return (torch.randint(sizes["vocabulary"], shape, generator=generator),)


@dataclass(frozen=True)
class ZooEntry:
    """A network of the zoo.

    ``make``: sizes → the network. ``inputs``: sizes and a generator → a random batch. ``sizes``: those that the network
    has, as they are when nobody says otherwise; ``tiny``: what of them to change so that a step takes a moment.
    ``multiple``, ``least``: what a size must be a multiple of, and its least value, where that is not 1. ``stride``:
    image side ÷ side of the smallest features if batch norm is there, else None. ``loss``: the one it is trained with.
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

    def complete(self, given: Mapping[str, int | None]) -> dict[str, int]:
        """All sizes: the given ones, and the network's own for the others and for None.

        Raises:
            ZooError: a size that the network does not have or that does not fit it, or one value a channel in batch
                norm.
        """
        stated = {name: size for name, size in given.items() if size is not None}
        for name in stated:
            if name not in self.sizes:
                raise ZooError(f"{self.name} has no size {name}; it has {', '.join(self.sizes)}")
        sizes = {**self.sizes, **stated}
        for name, size in sizes.items():
            self._check(name, size)
        if self.stride and sizes["batch"] == 1 and sizes["image"] <= self.stride:
            raise ZooError(
                f"{self.name}: batch norm sees one value a channel at batch 1 and image {sizes['image']}; "
                f"training needs batch 2 or an image over {self.stride}"
            )
        return sizes

    def _check(self, name: str, size: int) -> None:
        least, multiple = self.least.get(name, 1), self.multiple.get(name, 1)
        if size < least or size % multiple:
            divisible = f" and divisible by {multiple}" if multiple > 1 else ""
            raise ZooError(f"{self.name}: {name} is {size}; it must be {least} or more{divisible}")
