"""The ONNX ops Resize and Upsample: torch's kernels where they equal ONNX's formulas.

Otherwise axis by axis: ``nearest`` selects elements by indices, the other modes multiply by an interpolation matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    number,
    op,
    refuse,
    text,
)

LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


@dataclass(frozen=True, slots=True)
class Axis:
    """How a Resize node resizes one axis of a tensor."""

    at: int
    """The axis."""
    n: int
    """The number of elements before resizing."""
    out: int
    """The number of elements after resizing, about ``n · scale``."""
    scale: float
    """The factor by which ONNX's formulas scale coordinates."""
    start: float = 0.0
    end: float = 1.0
    """With ``start``: the region of the input, as fractions of the axis, for ``tf_crop_and_resize``."""

    @property
    def length(self) -> float:
        """The length of the resized axis before it is rounded to an integer, ``n · scale``. ONNX's formulas for
        coordinates use it."""
        return self.n * self.scale


@dataclass(frozen=True, slots=True)
class Rule:
    """How a Resize or Upsample node interpolates; in parentheses the ONNX attributes."""

    mode: str
    """``nearest``, ``linear`` or ``cubic``."""
    coordinates: str
    """The formula from positions in the result to positions in the input (``coordinate_transformation_mode``), a key
    of `COORDINATES`."""
    rounding: str
    """How ``nearest`` rounds positions (``nearest_mode``), a key of `ROUNDINGS`."""
    cubic: float
    """The coefficient a of the cubic kernel (``cubic_coeff_a``)."""
    exclude_outside: bool
    """Whether positions outside of the input get weight 0."""
    antialias: bool
    """Whether the kernel is widened when an axis shrinks."""
    extrapolation: float
    """The result outside of the input for ``tf_crop_and_resize`` (``extrapolation_value``)."""


def _rule(node: Node, coordinates: str) -> Rule:
    """Return how a node interpolates. ``coordinates``: the default of its ``coordinate_transformation_mode``."""
    return Rule(
        mode=text(node, "mode", "nearest"),
        coordinates=text(node, "coordinate_transformation_mode", coordinates),
        rounding=text(node, "nearest_mode", "round_prefer_floor"),
        cubic=number(node, "cubic_coeff_a", -0.75),
        exclude_outside=bool(integer(node, "exclude_outside", 0)),
        antialias=bool(integer(node, "antialias", 0)),
        extrapolation=number(node, "extrapolation_value", 0.0),
    )


# ------------------------------------------------------------------ ONNX's coordinates and coefficients


def _half_pixel(i: np.ndarray, a: Axis) -> np.ndarray:
    return (i + 0.5) / a.scale - 0.5


def _symmetric(i: np.ndarray, a: Axis) -> np.ndarray:
    adjustment = a.out / (a.scale * a.n)
    return a.n / 2 * (1 - adjustment) + (i + 0.5) / a.scale - 0.5


def _crop(i: np.ndarray, a: Axis) -> np.ndarray:
    if a.out == 1:
        return i * 0 + 0.5 * (a.start + a.end) * (a.n - 1)
    return a.start * (a.n - 1) + i * (a.end - a.start) * (a.n - 1) / (a.length - 1)


COORDINATES: dict[str, Callable[[np.ndarray, Axis], np.ndarray]] = {
    "align_corners": lambda i, a: i * ((a.n - 1) / (a.length - 1)) if a.out > 1 else i * 0.0,
    "asymmetric": lambda i, a: i / a.scale,
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda i, a: _half_pixel(i, a) if a.out > 1 else i * 0.0,
    "tf_crop_and_resize": _crop,
    "tf_half_pixel_for_nn": lambda i, a: (i + 0.5) / a.scale,
}
ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
}


def _triangle(distance: np.ndarray, _: Rule) -> np.ndarray:
    height: np.ndarray = np.clip(1 - np.abs(distance), 0, None)
    return height


def _keys_cubic(distance: np.ndarray, rule: Rule) -> np.ndarray:
    a, d = rule.cubic, np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


KERNELS: dict[str, tuple[int, Callable[[np.ndarray, Rule], np.ndarray]]] = {
    "cubic": (2, _keys_cubic),
    "linear": (1, _triangle),
}


def _matrix(axis: Axis, rule: Rule) -> np.ndarray:
    """Return the matrix, ``axis.out`` × ``axis.n``, that interpolates linearly or cubically along an axis: the resized
    axis is the matrix times the input axis."""
    reach, kernel = KERNELS[rule.mode]
    x = COORDINATES[rule.coordinates](np.arange(axis.out, dtype=np.float64), axis)
    shrink = min(axis.scale, 1.0) if rule.antialias else 1.0
    span = math.ceil(reach / shrink)
    places = np.floor(x)[:, None] + np.arange(1 - span, span + 1)
    weights = kernel((places - x[:, None]) * shrink, rule)
    if rule.exclude_outside:
        weights = np.where((places < 0) | (places >= axis.n), 0.0, weights)
    if rule.exclude_outside or rule.antialias:
        weights = weights / weights.sum(1, keepdims=True)
    matrix = np.zeros((axis.out, axis.n))
    rows = np.broadcast_to(np.arange(axis.out)[:, None], places.shape)
    np.add.at(matrix, (rows, np.clip(places, 0, axis.n - 1).astype(int)), weights)
    return matrix


def _beyond(axis: Axis, rule: Rule) -> np.ndarray:
    """Return a mask of the elements of the resized axis that get the extrapolation value; none unless the
    coordinates are ``tf_crop_and_resize``."""
    x = COORDINATES[rule.coordinates](np.arange(axis.out, dtype=np.float64), axis)
    cropping = rule.coordinates == "tf_crop_and_resize"
    return ((x < 0) | (x > axis.n - 1)) if cropping else np.zeros(axis.out, dtype=bool)


# ------------------------------------------------------------------ interpolation


def _resized(node: Node, x: Tensor, axes: Sequence[Axis], rule: Rule) -> Tensor:
    """Resize ``axes`` of ``x`` by ``rule``: with torch's kernel if it equals ONNX's formulas, else axis by axis.
    `ModelError` for an unknown mode, coordinate formula or rounding."""
    if rule.coordinates not in COORDINATES or rule.rounding not in ROUNDINGS:
        raise refuse(
            node, f"coordinates {rule.coordinates!r} with rounding {rule.rounding!r} are not supported"
        )
    if rule.mode not in ("nearest", *KERNELS):
        raise refuse(node, f"the mode {rule.mode!r} is not supported")
    native = _native(x, axes, rule)
    if native is not None:
        return native
    for axis in axes:
        x = _one_axis(x, axis, rule)
    return x


def _one_axis(x: Tensor, axis: Axis, rule: Rule) -> Tensor:
    """Resize one axis of ``x``: select elements for ``nearest``, else multiply by the interpolation matrix. Positions
    outside of the input get ``rule.extrapolation`` for ``tf_crop_and_resize``."""
    outside = _beyond(axis, rule)
    if rule.mode == "nearest":
        coordinates = COORDINATES[rule.coordinates](np.arange(axis.out, dtype=np.float64), axis)
        places = np.clip(ROUNDINGS[rule.rounding](coordinates), 0, axis.n - 1).astype(np.int64)
        y = x.index_select(axis.at, torch.tensor(places.tolist(), dtype=torch.int64, device=x.device))
    else:
        matrix = torch.tensor(_matrix(axis, rule).tolist(), dtype=x.dtype, device=x.device)
        y = torch.matmul(x.movedim(axis.at, -1), matrix.t()).movedim(-1, axis.at)
    if outside.any():
        mask = torch.tensor(outside.tolist(), device=x.device).reshape(-1, *[1] * (x.dim() - axis.at - 1))
        y = y.masked_fill(mask, rule.extrapolation)
    return y


def _native(x: Tensor, axes: Sequence[Axis], rule: Rule) -> Tensor | None:
    """Return the result of `torch.nn.functional.interpolate`, or ``x`` if no axis is resized; None if torch may
    differ from ONNX's formulas."""
    spatial = {a.at: a for a in axes}
    if (
        x.dim() not in LINEAR
        or not x.is_floating_point()
        or min(spatial, default=2) < 2
        or rule.exclude_outside
    ):
        return None
    if rule.antialias or not axes:
        return None if axes else x
    size = [spatial[a].out if a in spatial else x.shape[a] for a in range(2, x.dim())]
    scale = [spatial[a].scale if a in spatial else 1.0 for a in range(2, x.dim())]
    # torch takes either sizes or scales, and computes the others from them. If ONNX keeps the aspect ratio, sizes and
    # scales may fit neither computation.
    if all(a.scale == a.out / a.n for a in axes):
        how: dict[str, Any] = {"size": size}
    elif all(a.out == math.floor(a.n * a.scale) for a in axes):
        how = {"scale_factor": scale}
    else:
        return None
    half = rule.coordinates == "half_pixel" or (rule.coordinates == "pytorch_half_pixel" and min(size) > 1)
    if rule.mode == "nearest" and rule.coordinates == "asymmetric" and rule.rounding == "floor":
        return F.interpolate(x, mode="nearest", **how)
    if rule.mode == "linear" and half:
        return F.interpolate(x, mode=LINEAR[x.dim()], align_corners=False, **how)
    whole = all(abs(a.length - a.out) < 1e-4 for a in axes)
    if rule.mode == "linear" and rule.coordinates == "align_corners" and whole:
        return F.interpolate(x, size=size, mode=LINEAR[x.dim()], align_corners=True)
    if rule.mode == "cubic" and half and x.dim() == 4 and rule.cubic == -0.75:
        return F.interpolate(x, mode="bicubic", align_corners=False, **how)
    return None


# ------------------------------------------------------------------ the ops


@op("Resize", 11, 13, 18, 19, known=(1, 2, 3))
def resize(node: Node, x: Tensor, roi: Known = None, scales: Known = None, sizes: Known = None) -> Tensor:
    """Run ONNX Resize: interpolate to ``sizes`` if given, else by ``scales``; `ModelError` without either. ``roi``:
    starts, then ends, of the region for ``tf_crop_and_resize``."""
    along = ints(node, "axes") or tuple(range(x.dim()))
    along = tuple(a % x.dim() for a in along)
    region = (
        [0.0] * len(along) + [1.0] * len(along) if roi is None or not roi.size else [float(r) for r in roi]
    )
    rule = _rule(node, "half_pixel")
    if sizes is not None and sizes.size:
        wanted, ratios = _sizes(node, x, along, known_ints(sizes) or ())
    elif scales is not None and scales.size:
        ratios = [float(s) for s in scales]
        wanted = [math.floor(x.shape[a] * s) for a, s in zip(along, ratios, strict=True)]
    else:
        raise refuse(node, "neither scales nor sizes are given")
    axes = [
        Axis(a, x.shape[a], out, scale, region[k], region[len(along) + k])
        for k, (a, out, scale) in enumerate(zip(along, wanted, ratios, strict=True))
        if out != x.shape[a] or scale != 1.0 or rule.coordinates == "tf_crop_and_resize"
    ]
    return _resized(node, x, axes, rule)


def _sizes(
    node: Node, x: Tensor, along: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the new sizes and scale factors of the axes in ``along``. Unless ``keep_aspect_ratio_policy`` is
    ``stretch``, all get one factor."""
    ratios = [s / x.shape[a] for a, s in zip(along, sizes, strict=True)]
    policy = text(node, "keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return list(sizes), ratios
    scale = max(ratios) if policy == "not_smaller" else min(ratios)
    return [math.floor(scale * x.shape[a] + 0.5) for a in along], [scale] * len(along)


@op("Resize", 10, known=(1,))
@op("Upsample", 9, 10, known=(1,))
def upsample(node: Node, x: Tensor, scales: np.ndarray) -> Tensor:
    """Run ONNX Resize of opset 10, or Upsample: multiply each axis by its scale, rounded down. Position i maps to i
    ÷ scale."""
    factors = [float(s) for s in scales]
    wanted = [math.floor(n * s) for n, s in zip(x.shape, factors, strict=True)]
    axes = [
        Axis(a, x.shape[a], out, s)
        for a, (out, s) in enumerate(zip(wanted, factors, strict=True))
        if s != 1.0
    ]
    rule = Rule(text(node, "mode", "nearest"), "asymmetric", "floor", -0.75, False, False, 0.0)
    return _resized(node, x, axes, rule)


op("Upsample", 7)(by_attributes(upsample, "scales"))
