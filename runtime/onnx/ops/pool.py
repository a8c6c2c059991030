"""ONNX ops for pooling as functions on torch tensors, with ONNX's rules for padding, ceiling, dilation and indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.nn import CONV, pad_spatial, spread, window_pads
from rematplan.runtime.onnx.ops.rows import Known, integer, ints, number, op, refuse, text

MAX_POOL: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True, slots=True)
class Window:
    """The geometry of a pooling window. Each field except ``ceil`` has a number for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    """With ``kernel`` and ``strides``: as in torch."""
    before: tuple[int, ...]
    after: tuple[int, ...]
    """With ``before``: the padding at both ends of the axis, as ``pads`` or ``auto_pad`` states it."""
    reach: tuple[int, ...]
    """The elements from the end of the axis to the end of the last window, which may differ from ``after``."""
    ceil: bool
    """Whether the output size is rounded up."""

    @property
    def native(self) -> bool:
        """Whether torch's pooling supports the padding: it is symmetric and at most half a kernel."""
        return self.before == self.after and all(
            2 * p <= k for p, k in zip(self.before, self.kernel, strict=True)
        )


def window(node: Node, x: Tensor) -> Window:
    """Return a pooling window on ``x`` (N, C, …), by ONNX's output size. `ModelError` if ``kernel_shape`` is absent,
    does not match the input's spatial axes, or there are not 1 to 3 of these."""
    kernel = ints(node, "kernel_shape")
    rank = x.dim() - 2
    if kernel is None or len(kernel) != rank or rank not in MAX_POOL:
        raise refuse(node, f"kernel_shape {kernel} does not fit an input with {rank} spatial axes")
    strides, dilations = spread(node, "strides", rank), spread(node, "dilations", rank)
    before, after = window_pads(node, x.shape[2:], kernel, strides, dilations)
    ceil = bool(integer(node, "ceil_mode", 0)) and text(node, "auto_pad", "NOTSET") == "NOTSET"
    reach = []
    for n, k, s, d, b, a in zip(x.shape[2:], kernel, strides, dilations, before, after, strict=True):
        span = n + b + a - ((k - 1) * d + 1)
        steps = math.ceil(span / s) if ceil else span // s
        if ceil and steps * s >= n + b:  # a window that would start in the padding after the input is dropped
            steps -= 1
        reach.append(steps * s + (k - 1) * d + 1 - n - b)
    return Window(kernel, strides, dilations, before, after, tuple(reach), ceil)


@op("MaxPool", 1, 8, 10, 11, 12, 22)
def max_pool(node: Node, x: Tensor) -> Any:
    """Run ONNX MaxPool over windows of ``x`` (N, C, …) with 1 to 3 spatial axes. If the node has a second output, also
    return the maxima's positions in the flattened ``x``."""
    w = window(node, x)
    indices = len(node.outputs) > 1 and bool(node.outputs[1])
    # torch pools only floats, in which eight-bit integers are exact.
    exact = x if x.is_floating_point() else x.to(torch.float32)
    if w.native:
        pads, padded = w.before, exact
    else:
        pads, padded = (0,) * len(w.kernel), pad_spatial(exact, w.before, w.reach, -math.inf)
    result = MAX_POOL[len(w.kernel)](
        padded, w.kernel, w.strides, pads, w.dilations, w.ceil and w.native, indices
    )
    if not indices:
        return result.to(x.dtype)
    values, places = result
    return values.to(x.dtype), _global_places(
        node, x, padded, places, (0,) * len(pads) if w.native else w.before
    )


def _global_places(node: Node, x: Tensor, padded: Tensor, places: Tensor, before: tuple[int, ...]) -> Tensor:
    """Convert torch's positions of maxima, within a padded channel, to ONNX's in the flattened ``x``, by the node's
    ``storage_order``. ``before``: the padding of ``padded`` before each spatial axis."""
    sizes, coordinates, rest = padded.shape[2:], [], places
    for size, shift in zip(reversed(sizes), reversed(before), strict=True):
        coordinates.append(rest % size - shift)
        rest = rest // size
    order = list(zip(reversed(coordinates), x.shape[2:], strict=True))
    if integer(node, "storage_order", 0):
        order.reverse()
    flat = torch.zeros_like(places)
    for coordinate, size in order:
        flat = flat * size + coordinate
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device) * math.prod(x.shape[2:])
    return flat + planes.view(x.shape[0], x.shape[1], *[1] * (x.dim() - 2))


@op("MaxUnpool", 9, 11, 22, known=(2,))
def max_unpool(node: Node, x: Tensor, places: Tensor, shape: Known = None) -> Tensor:
    """Run ONNX MaxUnpool: write ``x`` (N, C, …) to the positions ``places`` of flattened zeros. These have the size
    that MaxPool with the node's attributes reduces to that of ``x``, and zeros follow up to ``shape`` if larger."""
    rank = x.dim() - 2
    kernel, strides = ints(node, "kernel_shape"), spread(node, "strides", rank)
    if kernel is None or len(kernel) != rank:
        raise refuse(node, f"kernel_shape {kernel} does not fit an input with {rank} spatial axes")
    pads = ints(node, "pads") or (0,) * (2 * rank)
    sizes = [
        (n - 1) * s + k - b - a
        for n, s, k, b, a in zip(x.shape[2:], strides, kernel, pads[:rank], pads[rank:], strict=True)
    ]
    empty = torch.zeros(math.prod(x.shape[:2]) * math.prod(sizes), dtype=x.dtype, device=x.device)
    found = empty.scatter(0, places.reshape(-1), x.reshape(-1)).view(*x.shape[:2], *sizes)
    if shape is None:
        return found
    return pad_spatial(found, (0,) * rank, [int(n) - have for n, have in zip(shape[2:], sizes, strict=True)])


@op("AveragePool", 1, 7, 10, 11, 19, 22)
def average_pool(node: Node, x: Tensor) -> Tensor:
    """Run ONNX AveragePool on ``x`` (N, C, …), 1 to 3 spatial axes. Padding counts if ``count_include_pad`` is set."""
    w = window(node, x)
    counted = bool(integer(node, "count_include_pad", 0))
    rank = len(w.kernel)
    if w.native and set(w.dilations) == {1}:
        return AVG_POOL[rank](x, w.kernel, w.strides, w.before, w.ceil, counted)
    total = _window_sum(pad_spatial(x, w.before, w.reach), w)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    ones = pad_spatial(ones, w.before, w.after, 1.0 if counted else 0.0)
    over = [r - a for r, a in zip(w.reach, w.after, strict=True)]
    return total / _window_sum(pad_spatial(ones, (0,) * rank, over), w)


def _window_sum(x: Tensor, w: Window) -> Tensor:
    planes = x.reshape(-1, 1, *x.shape[2:])
    ones = torch.ones((1, 1, *w.kernel), dtype=x.dtype, device=x.device)
    total = CONV[len(w.kernel)](planes, ones, None, w.strides, 0, w.dilations)
    return total.reshape(*x.shape[:2], *total.shape[2:])


@op("LpPool", 1, 2, 11, 18, 22)
def lp_pool(node: Node, x: Tensor) -> Tensor:
    """Run ONNX LpPool: (Σ |x|ᵖ)^(1/p) over each window of ``x`` (N, C, …), with 1 to 3 spatial axes."""
    w = window(node, x)
    p = number(node, "p", 2)
    return _window_sum(pad_spatial(x.abs().pow(p), w.before, w.reach), w).pow(1.0 / p)


@op("GlobalAveragePool", 1, 22)
def global_average_pool(node: Node, x: Tensor) -> Tensor:
    """Run ONNX GlobalAveragePool: (N, C, …) to (N, C, 1, …), the mean over all spatial axes."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@op("GlobalMaxPool", 1, 22)
def global_max_pool(node: Node, x: Tensor) -> Tensor:
    """Run ONNX GlobalMaxPool: (N, C, …) to (N, C, 1, …), the maximum over all spatial axes."""
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


@op("GlobalLpPool", 1, 2, 22)
def global_lp_pool(node: Node, x: Tensor) -> Tensor:
    """Run ONNX GlobalLpPool: (N, C, …) to (N, C, 1, …), the p-norm over all spatial axes."""
    norm: Tensor = torch.linalg.vector_norm(x, number(node, "p", 2), tuple(range(2, x.dim())), keepdim=True)
    return norm
