"""The name of the module, or of the node of an ONNX file, that an op of a traced graph belongs to."""

from __future__ import annotations

import re

from torch import fx

MODULE = "rematplan.module"
"""The key under which a node's annotations have the name of its module."""
ONNX_NODE = "rematplan.onnx_node"
"""The key under which a node's annotations have the name of the ONNX node that it executes, as `dotted` returns it."""
STACK = "nn_module_stack"
"""The key under which TorchDynamo and `torch.export` store the modules of a node."""


def dotted(name: str) -> str:
    """Return the name of an ONNX node in the form of module names. For example, ``/layers.0/fc/MatMul`` becomes
    ``layers.0.fc.MatMul``, and ``/blocks/blocks.1/Add`` becomes ``blocks.1.Add``: PyTorch's exporter repeats the name
    of a sequence of modules in the names of its members."""
    parts: list[str] = []
    for part in name.strip("/").split("/"):
        if parts and part.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def onnx_node(node: fx.Node) -> str:
    """Return the dotted name of the ONNX node that the op of ``node`` executes; empty if there is none."""
    return str((node.meta.get("custom") or {}).get(ONNX_NODE, ""))


def module_name(node: fx.Node) -> str:
    """Return the name of the submodule whose forward calls the op of ``node``: as capture recorded it, otherwise as
    TorchDynamo did. Empty if neither did. The dotted name of an ONNX node follows the name of its module."""
    own = (node.meta.get("custom") or {}).get(MODULE)
    if own is not None:
        return ".".join(filter(None, (str(own), onnx_node(node))))
    stack = list((node.meta.get(STACK) or {}).values())
    return re.sub(r"^L\['\w+'\]\.?", "", str(stack[-1][0])) if stack else ""


def module_names(node: fx.Node) -> tuple[str, ...]:
    """Return the names of all modules that contain a node of an exported graph, from outer to inner. The model itself
    is left out.

    For an op that executes an ONNX node, the dotted name of that node and its prefixes follow, as if they were
    modules.
    """
    modules = tuple(name for name, _ in (node.meta.get(STACK) or {}).values() if name)
    return (*modules, *prefixes(onnx_node(node)))


def prefixes(name: str) -> tuple[str, ...]:
    """Return the names of the modules that contain the module ``name``, from outer to inner, and ``name`` itself: for
    ``a.b``, these are ``a`` and ``a.b``. Empty for an empty name."""
    parts = name.split(".") if name else []
    return tuple(".".join(parts[: k + 1]) for k in range(len(parts)))
