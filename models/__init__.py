"""Networks to plan: ``nn.Module``s with batch, image size and width as arguments, and their ONNX export."""

from rematplan.models.errors import ZooError
from rematplan.models.export import export_onnx
from rematplan.models.resnet import ResNet
from rematplan.models.unet import UNet
from rematplan.models.vgg import VGG
from rematplan.models.zoo import ZOO, ZooEntry, build, entry, example_inputs

__all__ = [
    "VGG",
    "ZOO",
    "ResNet",
    "UNet",
    "ZooEntry",
    "ZooError",
    "build",
    "entry",
    "example_inputs",
    "export_onnx",
]
