"""The reversible networks of the zoo. Their modules do not declare that they can be inverted: rematplan finds the
inverses in the captured ops."""

from __future__ import annotations

from rematplan.models.entry import IMAGENET, TINY, ZooEntry, tokens
from rematplan.models.revcol import STRIDE as COLUMN_STRIDE
from rematplan.models.revcol import RevCol
from rematplan.models.revnet import STRIDE as REVNET_STRIDE
from rematplan.models.revnet import RevNet
from rematplan.models.revvit import RevBERT, RevSwin, RevViT
from rematplan.models.swin import STRIDE as SWIN_STRIDE
from rematplan.models.vit import PATCH

CIFAR = {"batch": 128, "image": 32, "width": 32, "classes": 10}
TINY_CIFAR = {"batch": 2, "image": 8, "width": 4}


def _revnet(name: str, depth: int, reversible: int) -> ZooEntry:
    return ZooEntry(
        name,
        "classes",
        lambda s: RevNet(depth, s["width"], s["classes"], reversible),
        CIFAR,
        TINY_CIFAR,
        multiple={"image": REVNET_STRIDE, "width": 4},
        stride=REVNET_STRIDE,
    )


ENTRIES = (
    _revnet("revnet38", 38, 3),
    _revnet("revnet110", 110, 3),
    _revnet("hybrid38", 38, 2),
    ZooEntry(
        "revvit_s",
        "classes",
        lambda s: RevViT(s["image"], s["depth"], s["width"], s["classes"]),
        IMAGENET | {"depth": 12, "width": 384},
        TINY | {"image": 32, "depth": 3},
        multiple={"image": PATCH},
    ),
    ZooEntry(
        "revswin_t",
        "classes",
        lambda s: RevSwin(s["image"], s["width"], s["classes"]),
        IMAGENET | {"width": 96},
        TINY,
        multiple={"image": SWIN_STRIDE},
    ),
    ZooEntry(
        "revbert",
        "tokens",
        lambda s: RevBERT(s["depth"], s["width"], s["vocabulary"], s["tokens"]),
        {"batch": 8, "tokens": 512, "depth": 12, "width": 768, "vocabulary": 50265},
        {"batch": 2, "tokens": 6, "depth": 3, "width": 8, "vocabulary": 20},
        tokens,
    ),
    ZooEntry(
        "revcol_t",
        "classes",
        lambda s: RevCol(s["width"], s["classes"]),
        IMAGENET,
        TINY,
        multiple={"image": COLUMN_STRIDE},
    ),
)
