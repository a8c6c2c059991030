"""Implementations of ONNX ops on shapes: a tensor's sizes as values, reshapes and other views, moves between channels
and space, and type conversions."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import (
    Known,
    by_attributes,
    integer,
    ints,
    known_ints,
    op,
    refuse,
    text,
)
from rematplan.runtime.onnx.ops.values import ONNX_DTYPES, to_tensor

# ------------------------------------------------------------------ shapes as values


def stated_sizes(node: Node, x: Tensor) -> list[int]:
    """Return the sizes that ONNX's Shape op returns for ``x``: those of the axes from the node's attribute ``start`` up
    to, but without, ``end``."""
    end = integer(node, "end", x.dim())
    return list(x.shape)[integer(node, "start", 0) : end]


@op("Shape", 1, 13, 15, 19, 21, 23, 24, 25)
def shape(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Shape: the sizes of ``x`` from the attribute ``start`` up to, but without, ``end``, as an int64
    tensor."""
    return torch.tensor(stated_sizes(node, x), dtype=torch.int64)


@op("Size", 1, 13, 19, 21, 23, 24, 25)
def size(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Size: the number of elements of ``x``, as an int64 tensor."""
    return torch.tensor(math.prod(x.shape), dtype=torch.int64)


def _filled(shape: np.ndarray) -> int:
    return math.prod(abs(int(d)) for d in shape.ravel())


@op("ConstantOfShape", 9, 20, 21, 23, 24, 25, known=(0,), size=_filled)
def constant_of_shape(node: Node, shape: np.ndarray) -> Tensor:
    """Run ONNX ConstantOfShape: a tensor of a shape, filled with the attribute ``value`` (by default float32 zero)."""
    value = node.attributes.get("value", np.zeros(1, np.float32))
    fill = to_tensor(np.asarray(value), "ConstantOfShape's value")
    return torch.full(known_ints(shape), np.asarray(value).ravel()[0].item(), dtype=fill.dtype)  # type: ignore[arg-type]


@op("Constant", 1, 9, 11, 12, 13, 19, 21, 23, 24, 25)
def constant(node: Node) -> Tensor:
    """Run ONNX Constant: the attribute ``value`` as a tensor. Most Constant nodes never run, because reading the file
    turns them into weights."""
    return to_tensor(np.asarray(node.attributes["value"]), "Constant's value")


def _range_size(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> int:
    return max(0, math.ceil((float(limit) - float(start)) / float(delta)))


@op("Range", 11, 27, known=(0, 1, 2), size=_range_size)
def arange(node: Node, start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Tensor:
    """Run ONNX Range: ``start``, ``start + delta``, … up to ``limit``, which is excluded. The result has the type of
    ``start``."""
    dtype = to_tensor(start).dtype
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=dtype)


@op("EyeLike", 9, 22)
def eye_like(node: Node, x: Tensor) -> Tensor:
    """Run ONNX EyeLike: ones on the diagonal at offset ``k``, zeros elsewhere, in the shape of ``x`` and the type
    ``dtype``, else its type."""
    dtype = ONNX_DTYPES[integer(node, "dtype", 0)] if "dtype" in node.attributes else x.dtype
    rows, columns = x.shape
    shifted = torch.arange(columns, device=x.device) - torch.arange(rows, device=x.device)[:, None]
    return (shifted == integer(node, "k", 0)).to(dtype)


@op("NonZero", 9, 13)
def non_zero(node: Node, x: Tensor) -> Tensor:
    """Run ONNX NonZero: the indices of the nonzero elements, of shape (axes of ``x``, number of such elements). The
    shape depends on data."""
    return torch.nonzero(x).t().contiguous() if x.dim() else torch.nonzero(x).t()


# ------------------------------------------------------------------ views


@op("Identity", 1, 13, 14, 16, 19, 21, 23, 24, 25)
def identity(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Identity: the input itself."""
    return x


@op("Reshape", 5, 13, 14, 19, 21, 23, 24, 25, known=(1,))
def reshape(node: Node, x: Tensor, shape: np.ndarray) -> Tensor:
    """Run ONNX Reshape. A 0 copies the size of that axis of ``x`` unless ``allowzero`` is set; a −1 is inferred."""
    sizes = known_ints(shape) or ()
    if not integer(node, "allowzero", 0):
        sizes = tuple(x.shape[i] if s == 0 and i < x.dim() else s for i, s in enumerate(sizes))
    return x.reshape(sizes)


op("Reshape", 1)(by_attributes(reshape, "shape"))


@op("Flatten", 1, 9, 11, 13, 21, 23, 24, 25)
def flatten(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Flatten: reshape to two axes, the product of the axes before ``axis`` and the product of the others."""
    axis = integer(node, "axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@op("Transpose", 1, 13, 21, 23, 24, 25)
def transpose(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Transpose: permute the axes by the attribute ``perm``; without it, reverse them."""
    return x.permute(ints(node, "perm") or tuple(reversed(range(x.dim()))))


@op("Unsqueeze", 13, 21, 23, 24, 25, known=(1,))
def unsqueeze(node: Node, x: Tensor, axes: np.ndarray) -> Tensor:
    """Run ONNX Unsqueeze: insert axes of size 1 at the positions ``axes`` in the result; `ModelError` for equal ones
    and those outside."""
    wanted = known_ints(axes) or ()
    rank = x.dim() + len(wanted)
    places = {a % rank for a in wanted}
    if len(places) != len(wanted) or any(not -rank <= a < rank for a in wanted):
        raise refuse(node, f"axes {wanted} do not fit a result of {rank} axes")
    for axis in sorted(places):
        x = x.unsqueeze(axis)
    return x


op("Unsqueeze", 1, 11)(by_attributes(unsqueeze, "axes"))


@op("Squeeze", 13, 21, 23, 24, 25, known=(1,))
def squeeze(node: Node, x: Tensor, axes: Known = None) -> Tensor:
    """Run ONNX Squeeze: drop ``axes`` of size 1 (None: all); `ModelError` for axes of another size."""
    wanted = known_ints(axes)
    wanted = tuple(a for a, n in enumerate(x.shape) if n == 1) if wanted is None else wanted
    if any(x.shape[a] != 1 for a in wanted):
        raise refuse(node, f"axes {wanted} of shape {tuple(x.shape)} are not all of size one")
    return x.squeeze(wanted)


op("Squeeze", 1, 11)(by_attributes(squeeze, "axes"))


def _expanded_size(x: np.ndarray, shape: np.ndarray) -> int:
    return _filled(shape) * max(1, x.size)


@op("Expand", 8, 13, known=(1,), size=_expanded_size)
def expand(node: Node, x: Tensor, shape: np.ndarray) -> Tensor:
    """Run ONNX Expand: broadcast ``x`` to the shape to which ``x`` and ``shape`` broadcast. ``shape`` may have 1 where
    ``x`` is larger."""
    return x.expand(np.broadcast_shapes(tuple(x.shape), known_ints(shape) or ()))


@op("Tile", 6, 13, known=(1,), size=_expanded_size)
def tile(node: Node, x: Tensor, repeats: np.ndarray) -> Tensor:
    """Run ONNX Tile: repeat ``x`` along each axis; ``repeats`` has the number of repetitions of each axis."""
    return x.repeat(known_ints(repeats) or ())


# ------------------------------------------------------------------ blocks of space


@op("DepthToSpace", 1, 11, 13, 28)
def depth_to_space(node: Node, x: Tensor) -> Tensor:
    """Run ONNX DepthToSpace: move channels into blocks of b × b pixels, from (N, C, H, W) to (N, C ÷ b², H b, W b)."""
    block, (n, c, h, w) = integer(node, "blocksize", 1), x.shape
    if text(node, "mode", "DCR") == "CRD":
        # CRD: the b² channels of a block are next to each other. DCR: they are C ÷ b² apart.
        return F.pixel_shuffle(x, block)
    blocks = x.reshape(n, block, block, c // (block * block), h, w)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(n, c // (block * block), h * block, w * block)


@op("SpaceToDepth", 1, 13, 28)
def space_to_depth(node: Node, x: Tensor) -> Tensor:
    """Run ONNX SpaceToDepth: blocks of b × b pixels become channels, from (N, C, H, W) to (N, C b², H ÷ b, W ÷ b)."""
    block, (n, c, h, w) = integer(node, "blocksize", 1), x.shape
    if text(node, "mode", "DCR") == "CRD":
        # CRD: the b² channels of a block are next to each other. DCR: they are C apart.
        return F.pixel_unshuffle(x, block)
    blocks = x.reshape(n, c, h // block, block, w // block, block)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, c * block * block, h // block, w // block)


# ------------------------------------------------------------------ types


def _castable(node: Node) -> None:
    if integer(node, "to", 0) not in ONNX_DTYPES:
        raise refuse(node, f"the element type {integer(node, 'to', 0)} is not supported")


@op("Cast", 6, 9, 13, 19, 21, 23, 24, 25, 28, check=_castable)
def cast(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Cast: convert ``x`` to the type ``to``. The op table refuses types that `ONNX_DTYPES` lacks."""
    return x.to(ONNX_DTYPES[integer(node, "to", 0)])


@op("CastLike", 15, 19, 21, 23, 24, 25)
def cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    """Run ONNX CastLike: convert ``x`` to the element type of ``like``."""
    return x.to(like.dtype)
