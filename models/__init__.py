"""The zoo: known networks of any size as ``nn.Module``s, for examples and benchmarks, with an export to ONNX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rematplan.models.names import SIZES, ZooError

if TYPE_CHECKING:
    from rematplan.models.bert import BERT
    from rematplan.models.chain import Chain
    from rematplan.models.densenet import DenseNet
    from rematplan.models.diffusion_unet import DiffusionUNet
    from rematplan.models.efficientnet import EfficientNet
    from rematplan.models.entry import ZooEntry
    from rematplan.models.export import export_onnx
    from rematplan.models.googlenet import GoogLeNet
    from rematplan.models.gpt import GPT
    from rematplan.models.lstm import UnrolledLSTM
    from rematplan.models.mobilenet import MobileNetV2
    from rematplan.models.pspnet import PSPNet
    from rematplan.models.resnet import ResNet
    from rematplan.models.swin import Swin
    from rematplan.models.unet import UNet
    from rematplan.models.vgg import VGG
    from rematplan.models.vit import ViT
    from rematplan.models.zoo import ZOO, build, example_inputs

__all__ = [
    "BERT",
    "GPT",
    "SIZES",
    "VGG",
    "ZOO",
    "Chain",
    "DenseNet",
    "DiffusionUNet",
    "EfficientNet",
    "GoogLeNet",
    "MobileNetV2",
    "PSPNet",
    "ResNet",
    "Swin",
    "UNet",
    "UnrolledLSTM",
    "ViT",
    "ZooEntry",
    "ZooError",
    "build",
    "example_inputs",
    "export_onnx",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rematplan.models' has no attribute {name!r}")
    from rematplan.models import export, zoo  # imported at the first use of a network, since they load torch

    return getattr(export if name == "export_onnx" else zoo, name)
