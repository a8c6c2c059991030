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
    """Return the name of an ONNX node like a module's: ``layers.0.fc.MatMul`` for ``/layers.0/fc/MatMul``. A part that
    the next one repeats is dropped: ``blocks`` of ``blocks/blocks.1``."""
    parts: list[str] = []
    for part in name.strip("/").split("/"):
        # PyTorch's exporter repeats a sequence's name in its members: ``/blocks/blocks.1/Add`` becomes
        # ``blocks.1.Add``.
        if parts and part.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def onnx_node(node: fx.Node) -> str:
    """Return the dotted name of the ONNX node that the op of ``node`` executes; empty if there is none."""
    return str((node.meta.get("custom") or {}).get(ONNX_NODE, ""))


def module_name(node: fx.Node) -> str:
    """Return the name of the submodule that calls the op of ``node``; empty if unknown. Capture's record, to which the
    ONNX node's name is appended, goes before TorchDynamo's."""
    own = (node.meta.get("custom") or {}).get(MODULE)
    if own is not None:
        return ".".join(filter(None, (str(own), onnx_node(node))))
    stack = list((node.meta.get(STACK) or {}).values())
    return re.sub(r"^L\['\w+'\]\.?", "", str(stack[-1][0])) if stack else ""


def module_names(node: fx.Node) -> tuple[str, ...]:
    """Return the modules around a node, from outer to inner, without the model; then its ONNX node's prefixes."""
    modules = tuple(name for name, _ in (node.meta.get(STACK) or {}).values() if name)
    return (*modules, *prefixes(onnx_node(node)))


def prefixes(name: str) -> tuple[str, ...]:
    """Return the names that contain the module ``name``, and ``name``: ``a`` and ``a.b`` for ``a.b``. Empty for an
    empty name."""
    parts = name.split(".") if name else []
    return tuple(".".join(parts[: k + 1]) for k in range(len(parts)))
