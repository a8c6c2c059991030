"""The names of the zoo's networks and sizes, and its error. It loads no torch, so that unknown names are
refused at once.
"""

from __future__ import annotations

SIZES = {
    "batch": "samples in a batch",
    "image": "side of the image",
    "width": "channels, or features of a token",
    "tokens": "length of the sequence",
    "depth": "layers",
    "classes": "classes to score",
    "vocabulary": "distinct tokens",
}
"""The names of sizes, with their meanings; each network has some of them. ``image`` is in pixels."""

SUMMARIES = {
    "unet": "U-Net with batch norm, segmentation (Ronneberger et al. 2015)",
    **{f"resnet{n}": f"ResNet-{n}, image classification (He et al. 2016)" for n in (18, 34, 50, 101, 152)},
    "vgg19": "VGG-19 with dropout, image classification (Simonyan, Zisserman 2015)",
    "pspnet": "PSPNet on a dilated ResNet-101, segmentation (Zhao et al. 2017)",
    **{f"densenet{n}": f"DenseNet-{n}, image classification (Huang et al. 2017)" for n in (121, 161)},
    "googlenet": "GoogLeNet without batch norm, image classification (Szegedy et al. 2015)",
    "mobilenet_v2": "MobileNetV2 (Sandler et al. 2018), image classification",
    "efficientnet_b0": "EfficientNet-B0 (Tan, Le 2019), image classification",
    "vit_s": "Vision Transformer, small, patches of 16 (Touvron et al. 2021)",
    "vit_b": "Vision Transformer, base, patches of 16 (Dosovitskiy et al. 2021)",
    "swin_t": "Swin Transformer, tiny, image classification (Liu et al. 2021)",
    **{f"gpt{n}": f"GPT-2 of {n} layers, tied embeddings (Radford et al. 2019)" for n in (12, 24)},
    "bert": "BERT-base with its head for masked tokens (Devlin et al. 2019)",
    "roberta": "RoBERTa-base with its head for masked tokens (Liu et al. 2019)",
    "diffusion_unet": "U-Net of Stable Diffusion 1, noise in latents from a text (Rombach et al. 2022)",
    "lstm": "LSTM language model, unrolled, a cell a step (Zaremba et al. 2014)",
    "chain": "a plain chain of layers, orthogonal and tanh (Pennington et al. 2017)",
    "revnet38": "RevNet-38 for CIFAR (Gomez et al. 2017)",
    "revnet110": "RevNet-110 for CIFAR (Gomez et al. 2017)",
    "hybrid38": "RevNet-38 whose last stage is an ordinary ResNet's",
    "revvit_s": "Reversible Vision Transformer, small (Mangalam et al. 2022)",
    "revswin_t": "Swin Transformer, tiny, on two reversible streams",
    "revbert": "an encoder like RoBERTa's on two reversible streams",
    "revcol_t": "RevCol, tiny, four columns (Cai et al. 2023)",
}
"""One line about each network of the zoo, by the network's name."""


class ZooError(ValueError):
    """The requested network is not in the zoo, or cannot have the requested sizes or be exported. One line of text."""


def check_known(name: str) -> None:
    """Check that the zoo has a network called ``name``."""
    if name not in SUMMARIES:
        raise ZooError(f"unknown network {name!r}; known: {', '.join(SUMMARIES)}")
