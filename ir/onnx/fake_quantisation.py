"""Join each QuantizeLinear and the DequantizeLinear that reads it to a ``FakeQuantize``, through which
gradients pass.

Its derivative is 1 within the range of the integers and 0 outside (straight-through estimator, Bengio et al.,
arXiv:1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Array
from rematplan.ir.onnx.graph import Node

FAKE_QUANTIZE = "FakeQuantize"
Source = Callable[[str], Array | None]
"""Returns the tensor of this name if its value is known, else None."""
INT32 = (-(2**31), 2**31 - 1)
_GRID = ("axis", "block_size")


def with_fake_quantisation(nodes: Sequence[Node], source: Source) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """Replace each DequantizeLinear of a QuantizeLinear with equal parameters, also behind a Clip with known ends, by a
    FakeQuantize. Return the nodes, and a note if any were replaced."""
    writers = {o: node for node in nodes if not node.domain for o in node.outputs if o}
    new = tuple(_joined(node, writers, source) or node for node in nodes)
    count = sum(node.op == FAKE_QUANTIZE for node in new)
    note = (
        f"{count} pairs of QuantizeLinear and DequantizeLinear are trained straight through: the gradient of rounding "
        f"counts as 1 within the range of the integers"
    )
    return new, (note,) if count else ()


def _joined(node: Node, writers: dict[str, Node], source: Source) -> Node | None:
    """Return the FakeQuantize that replaces a DequantizeLinear after a QuantizeLinear of the same grid, perhaps with a
    Clip between them; None for any other node."""
    writer = writers.get(node.inputs[0]) if node.op == "DequantizeLinear" and not node.domain else None
    ends: tuple[int, int] | None = INT32
    # Torch's exporter may write a Clip of the integers between the two.
    if writer is not None and writer.op == "Clip":
        ends, writer = _ends(writer, source), writers.get(writer.inputs[0])
    if writer is None or ends is None or writer.op != "QuantizeLinear":
        return None
    grids = [[*n.inputs[1:], ""][:2] for n in (writer, node)]
    if not all(_same(a, b, source) for a, b in zip(*grids, strict=True)):
        return None
    if any(writer.attributes.get(key) != node.attributes.get(key) for key in _GRID):
        return None
    stated = {"quantised": writer.attributes.get("output_dtype", 0), "clip": ends}
    precision = {key: value for key, value in writer.attributes.items() if key == "precision"}
    return replace(
        node,
        op=FAKE_QUANTIZE,
        inputs=(writer.inputs[0], *writer.inputs[1:]),
        attributes={**node.attributes, **precision, **stated},
    )


def _ends(clip: Node, source: Source) -> tuple[int, int] | None:
    """Return the ends of the integers that a Clip lets pass; None if they are not known."""
    low, high = INT32
    for at, name in enumerate(clip.inputs[1:3]):
        array = source(name) if name else None
        if name and (array is None or array.dtype in roles.FLOATS):
            return None
        if array is not None:
            value = int(array.load().reshape(()))
            low, high = (value, high) if at == 0 else (low, value)
    return low, high


def _same(a: str, b: str, source: Source) -> bool:
    """Return whether two names are of one value, or of known tensors with equal content."""
    if a == b:
        return True
    one, other = (source(name) if name else None for name in (a, b))
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool(np.array_equal(one.load(), other.load()))
