"""The table of networks that have a name, and how to build one and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from rematplan.models.errors import ZooError
from rematplan.models.resnet import DEPTHS, ResNet
from rematplan.models.unet import LEVELS, UNet
from rematplan.models.vgg import STRIDE, VGG

OutputKind = Literal["classes", "pixels"]
"""What the network gives scores for: each image (N, C) or each of its pixels (N, C, H, W)."""


@dataclass(frozen=True)
class ZooEntry:
    """A network of the zoo.

    ``make``: image side, width, classes → the network. ``image``, ``batch``, ``width``, ``classes``: what it
    is built with when nobody says otherwise. ``image_step``: image sides must be multiples of it.
    ``least_image``: the least side. ``stride``: image side ÷ side of the smallest features if batch norm is
    there, else None.
    """

    name: str
    summary: str
    output: OutputKind
    make: Callable[[int, int, int], nn.Module]
    image: int
    batch: int
    width: int
    classes: int
    image_step: int = 1
    least_image: int = 1
    stride: int | None = None

    def check(self, batch: int, image: int, width: int, classes: int) -> None:
        """Refuse sizes that the network cannot have.

        Raises:
            ZooError: a size below one, an image side that does not fit, or one value a channel in batch norm.
        """
        for what, size in (("batch", batch), ("image", image), ("width", width), ("classes", classes)):
            if size < 1:
                raise ZooError(f"{self.name}: {what} is {size}; it must be 1 or more")
        if image < self.least_image or image % self.image_step:
            raise ZooError(
                f"{self.name}: image is {image}; it must be {self.least_image} or more"
                + (f" and divisible by {self.image_step}" if self.image_step > 1 else "")
            )
        if self.stride and batch == 1 and image <= self.stride:
            raise ZooError(
                f"{self.name}: batch norm sees one value a channel at batch 1 and image {image}; "
                f"training needs batch 2 or an image over {self.stride}"
            )


def _make_resnet(depth: int, image: int, width: int, classes: int) -> nn.Module:
    del image  # any size will do
    return ResNet(depth, width, classes)


def _make_unet(image: int, width: int, classes: int) -> nn.Module:
    del image  # any size divisible by 16 will do
    return UNet(width, classes)


def _resnet_entry(depth: int) -> ZooEntry:
    return ZooEntry(
        name=f"resnet{depth}",
        summary=f"ResNet-{depth}, image classification (He et al. 2016)",
        output="classes",
        make=partial(_make_resnet, depth),
        image=224,
        batch=8,
        width=64,
        classes=1000,
        stride=32,
    )


_UNET = ZooEntry(
    name="unet",
    summary="U-Net with batch norm, segmentation (Ronneberger et al. 2015)",
    output="pixels",
    make=_make_unet,
    image=192,
    batch=2,
    width=64,
    classes=2,
    image_step=2**LEVELS,
    least_image=2**LEVELS,
    stride=2**LEVELS,
)

_VGG19 = ZooEntry(
    name="vgg19",
    summary="VGG-19 with dropout, image classification (Simonyan, Zisserman 2015)",
    output="classes",
    make=VGG,
    image=224,
    batch=8,
    width=64,
    classes=1000,
    least_image=STRIDE,
)

ZOO: Mapping[str, ZooEntry] = MappingProxyType(
    {e.name: e for e in (_UNET, *(_resnet_entry(depth) for depth in DEPTHS), _VGG19)}
)
"""Every network by name."""


def entry(name: str) -> ZooEntry:
    """The entry of a name.

    Raises:
        ZooError: the name is not in the zoo; the message lists those that are.
    """
    if name not in ZOO:
        raise ZooError(f"no network is named {name!r}; known: {', '.join(ZOO)}")
    return ZOO[name]


def build(
    name: str, *, image: int | None = None, width: int | None = None, classes: int | None = None
) -> nn.Module:
    """A network of the zoo, in training mode, its weights drawn from torch's global generator.

    Raises:
        ZooError: an unknown name, or sizes that the network cannot have.
    """
    row = entry(name)
    sizes = (_given(image, row.image), _given(width, row.width), _given(classes, row.classes))
    row.check(row.batch, *sizes)
    return row.make(*sizes)


def example_inputs(
    name: str, batch: int | None = None, image: int | None = None, *, seed: int = 0
) -> tuple[Tensor, ...]:
    """A random batch of images (``batch``, 3, ``image``, ``image``) that a network accepts.

    Draws from a generator of its own, so that torch's global one stays where it was.

    Raises:
        ZooError: an unknown name, or sizes that the network cannot have.
    """
    row = entry(name)
    batch, image = _given(batch, row.batch), _given(image, row.image)
    row.check(batch, image, row.width, row.classes)
    return (torch.randn(batch, 3, image, image, generator=torch.Generator().manual_seed(seed)),)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
