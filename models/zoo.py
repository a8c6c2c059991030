"""The networks that come with rematplan (the zoo), by name, and functions that build a network and a batch for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Generator, Tensor, nn

from rematplan.models.bert import BERT
from rematplan.models.chain import Chain
from rematplan.models.densenet import DEPTHS as DENSENET_DEPTHS
from rematplan.models.densenet import DenseNet
from rematplan.models.diffusion_unet import CONTEXT, GROUPS, LATENT, MULTIPLES, DiffusionUNet
from rematplan.models.efficientnet import EfficientNet
from rematplan.models.entry import IMAGENET, TINY, Sizes, ZooEntry, rows, tokens
from rematplan.models.googlenet import GoogLeNet
from rematplan.models.gpt import GPT
from rematplan.models.lstm import UnrolledLSTM
from rematplan.models.mobilenet import MobileNetV2
from rematplan.models.names import check_known
from rematplan.models.pspnet import PSPNet
from rematplan.models.resnet import DEPTHS as RESNET_DEPTHS
from rematplan.models.resnet import ResNet
from rematplan.models.swin import STRIDE as SWIN_STRIDE
from rematplan.models.swin import Swin
from rematplan.models.unet import LEVELS, UNet
from rematplan.models.vgg import STRIDE as VGG_STRIDE
from rematplan.models.vgg import VGG
from rematplan.models.vit import PATCH, ViT
from rematplan.models.zoo_reversible import ENTRIES as REVERSIBLE


def _resnet(depth: int) -> ZooEntry:
    return ZooEntry(
        f"resnet{depth}",
        "classes",
        lambda s: ResNet(depth, s["width"], s["classes"]),
        IMAGENET,
        TINY,
        stride=32,
    )


def _densenet(depth: int) -> ZooEntry:
    return ZooEntry(
        f"densenet{depth}",
        "classes",
        lambda s: DenseNet(depth, s["width"], s["classes"]),
        IMAGENET | {"width": DENSENET_DEPTHS[depth][0]},
        TINY | {"width": 2},
        least={"image": 32},
        stride=32,
    )


def _mobile(name: str, network: type[MobileNetV2] | type[EfficientNet]) -> ZooEntry:
    return ZooEntry(
        name,
        "classes",
        lambda s: network(s["width"], s["classes"]),
        IMAGENET | {"width": 32},
        TINY,
        stride=32,
    )


def _vit(name: str, width: int) -> ZooEntry:
    return ZooEntry(
        name,
        "classes",
        lambda s: ViT(s["image"], s["depth"], s["width"], s["classes"]),
        IMAGENET | {"depth": 12, "width": width},
        TINY | {"depth": 2},
        multiple={"image": PATCH},
    )


def _gpt(depth: int, width: int) -> ZooEntry:
    return ZooEntry(
        f"gpt{depth}",
        "tokens",
        lambda s: GPT(s["depth"], s["width"], s["vocabulary"], s["tokens"]),
        {"batch": 8, "tokens": 1024, "depth": depth, "width": width, "vocabulary": 50257},
        {"batch": 2, "tokens": 16, "depth": 2, "width": 16, "vocabulary": 50},
        tokens,
    )


def _bert(name: str, vocabulary: int, spare: int, kinds: int) -> ZooEntry:
    """Return the entry of a network like BERT. ``spare``: positions beyond the tokens. ``kinds``: as in `BERT`."""
    return ZooEntry(
        name,
        "tokens",
        lambda s: BERT(s["depth"], s["width"], s["vocabulary"], s["tokens"] + spare, kinds),
        {"batch": 8, "tokens": 512, "depth": 12, "width": 768, "vocabulary": vocabulary},
        {"batch": 2, "tokens": 8, "depth": 2, "width": 16, "vocabulary": 50},
        tokens,
    )


def _context(width: int) -> int:
    """Return the number of features per token of the text that a diffusion network reads. It is proportional to the
    network's ``width``: 768 for 320."""
    return CONTEXT * width // 320


def _diffusion_inputs(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    batch, side = sizes["batch"], sizes["image"]
    return (
        torch.randn(batch, LATENT, side, side, generator=generator),
        torch.randint(1000, (batch,), generator=generator),
        torch.randn(batch, sizes["tokens"], _context(sizes["width"]), generator=generator),
    )


_ENTRIES = (
    ZooEntry(
        "unet",
        "pixels",
        lambda s: UNet(s["width"], s["classes"]),
        {"batch": 2, "image": 192, "width": 64, "classes": 2},
        {"image": 32, "width": 4},
        multiple={"image": 2**LEVELS},
        stride=2**LEVELS,
    ),
    *map(_resnet, RESNET_DEPTHS),
    ZooEntry(
        "vgg19",
        "classes",
        lambda s: VGG(s["image"], s["width"], s["classes"]),
        IMAGENET,
        TINY | {"image": 32},
        least={"image": VGG_STRIDE},
    ),
    ZooEntry(
        "pspnet",
        "pixels",
        lambda s: PSPNet(s["width"], s["classes"]),
        {"batch": 2, "image": 713, "width": 64, "classes": 19},
        {"image": 48, "width": 4},
        least={"batch": 2},
    ),
    *map(_densenet, (121, 161)),
    ZooEntry(
        "googlenet",
        "classes",
        lambda s: GoogLeNet(s["width"], s["classes"]),
        IMAGENET,
        TINY,
    ),
    _mobile("mobilenet_v2", MobileNetV2),
    _mobile("efficientnet_b0", EfficientNet),
    _vit("vit_s", 384),
    _vit("vit_b", 768),
    ZooEntry(
        "swin_t",
        "classes",
        lambda s: Swin(s["image"], s["width"], s["classes"]),
        IMAGENET | {"width": 96},
        TINY,
        multiple={"image": SWIN_STRIDE},
    ),
    _gpt(12, 768),
    _gpt(24, 1024),
    _bert("bert", 30522, 0, 2),
    _bert("roberta", 50265, 2, 1),
    ZooEntry(
        "diffusion_unet",
        "noise",
        lambda s: DiffusionUNet(s["width"], _context(s["width"])),
        {"batch": 4, "image": 64, "tokens": 77, "width": 320},
        {"batch": 2, "image": 8, "tokens": 3, "width": 32},
        _diffusion_inputs,
        multiple={"image": 2 ** (len(MULTIPLES) - 1), "width": GROUPS},
        loss="mse",
    ),
    ZooEntry(
        "lstm",
        "tokens",
        lambda s: UnrolledLSTM(s["depth"], s["width"], s["vocabulary"]),
        {"batch": 20, "tokens": 64, "depth": 2, "width": 650, "vocabulary": 10000},
        {"batch": 2, "tokens": 6, "width": 8, "vocabulary": 20},
        tokens,
    ),
    ZooEntry(
        "chain",
        "classes",
        lambda s: Chain(s["depth"], s["width"], s["classes"]),
        {"batch": 256, "depth": 1000, "width": 128, "classes": 10},
        {"batch": 2, "depth": 12, "width": 8},
        rows,
    ),
    *REVERSIBLE,
)

ZOO: Mapping[str, ZooEntry] = MappingProxyType({e.name: e for e in _ENTRIES})
"""All networks, by name."""


def entry(name: str) -> ZooEntry:
    """Return what the zoo knows of a network: its sizes with their defaults, and functions that make the network and
    a batch.
    """
    check_known(name)
    return ZOO[name]


def build(name: str, **sizes: int | None) -> nn.Module:
    """Return a network of the zoo in training mode, drawn from torch's global generator. Sizes that are
    missing or None get defaults.
    """
    row = entry(name)
    return row.make(row.complete(sizes))


def example_inputs(
    name: str, batch: int | None = None, image: int | None = None, *, seed: int = 0, **sizes: int | None
) -> tuple[Tensor, ...]:
    """Return a random batch, in the order of the forward's arguments. Sizes that are missing or None get
    defaults.

    ``seed``: of a generator of its own.
    """
    row = entry(name)
    stated = {"batch": batch, "image": image, **sizes}
    return row.inputs(row.complete(stated), torch.Generator().manual_seed(seed))
