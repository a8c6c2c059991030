"""The ONNX names of a loaded module's parameters and buffers."""

from urllib.parse import unquote


def onnx_name(name: str) -> str:
    """The ONNX name from which `torch_name` made a parameter name."""
    return unquote(name.removesuffix("%").replace(":", "."))
