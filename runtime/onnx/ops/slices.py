"""Rows for joining, splitting, slicing and padding tensors along axes."""

from __future__ import annotations

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
    present,
    refuse,
    text,
)

# ------------------------------------------------------------------ joining and splitting


@op("Concat", 1, 4, 11, 13)
def concat(node: Node, *tensors: Tensor) -> Tensor:
    """Run ONNX Concat: concatenate the tensors along ``axis``, which only opsets below 4 may omit (then it is 1)."""
    return torch.cat(present(tensors), integer(node, "axis", 1))


@op("Split", 1, 2, 11, 13, 18, known=(1,))
def split(node: Node, x: Tensor, sizes: Known = None) -> tuple[Tensor, ...]:
    """Run ONNX Split along ``axis`` into parts of ``sizes`` or the attribute ``split``, else into equal parts of
    which the last may be smaller."""
    axis, wanted = integer(node, "axis", 0), ints(node, "split") or known_ints(sizes)
    if not wanted:
        parts = integer(node, "num_outputs", len(node.outputs))
        each = -(-x.shape[axis] // parts)
        wanted = tuple(max(0, min(each, x.shape[axis] - each * i)) for i in range(parts))
    return torch.split(x, list(wanted), axis)


# ------------------------------------------------------------------ slicing


@op("Slice", 10, 11, 13, known=(1, 2, 3, 4))
def slice_(
    node: Node, x: Tensor, starts: np.ndarray, ends: np.ndarray, axes: Known = None, steps: Known = None
) -> Tensor:
    """Run ONNX Slice: slice ``x`` along ``axes`` as NumPy does; a negative step runs backwards. ``axes``: None for the
    first axes. ``steps``: None for 1."""
    first, last = known_ints(starts) or (), known_ints(ends) or ()
    along = known_ints(axes) or tuple(range(len(first)))
    stride = known_ints(steps) or (1,) * len(first)
    for axis, start, end, step in zip(along, first, last, stride, strict=True):
        picked = range(x.shape[axis])[slice(start, end, step)]
        if step < 0:
            x = x.flip(axis)
            mirror = x.shape[axis] - 1
            picked = range(mirror - picked.start, mirror - picked.stop, -step)
        if len(picked) < x.shape[axis]:
            x = _slice_of(x, axis, picked)
    return x


def _slice_of(x: Tensor, axis: int, picked: range) -> Tensor:
    whole = [slice(None)] * x.dim()
    whole[axis] = slice(picked.start, picked.stop, picked.step) if len(picked) else slice(0, 0)
    return x[tuple(whole)]


op("Slice", 1)(by_attributes(slice_, "starts", "ends", "axes"))

PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _mirror(mode: str, n: int, low: int, high: int) -> Tensor:
    places = torch.arange(-low, n + high)
    if mode == "edge":
        return places.clamp(0, n - 1)
    if mode == "wrap" or n == 1:
        return places % n
    period = 2 * (n - 1)
    return (n - 1) - ((places % period) - (n - 1)).abs()


@op("Pad", 11, 13, 18, 19, 21, 23, 24, 25, known=(1, 2, 3))
def pad(node: Node, x: Tensor, pads: np.ndarray, value: Known = None, axes: Known = None) -> Tensor:
    """Run ONNX Pad before and after each of ``axes`` (None: all), by ``mode``; negative padding crops. ``pads``: the
    padding before all axes, then after all axes. ``value``: what the mode ``constant`` adds, 0 for None. `ModelError`
    for an unknown mode."""
    mode, rank = text(node, "mode", "constant"), x.dim()
    fill = 0.0 if value is None or not value.size else value.reshape(()).item()
    along = [a % rank for a in (range(rank) if axes is None else known_ints(axes) or ())]
    ends = known_ints(pads) or ()
    before, after = dict(zip(along, ends, strict=False)), dict(zip(along, ends[len(along) :], strict=True))
    if mode not in PAD_MODES:
        raise refuse(node, f"the mode {mode!r} is not supported")
    if mode == "constant":
        pairs = [p for a in reversed(range(rank)) for p in (before.get(a, 0), after.get(a, 0))]
        return F.pad(x, pairs, value=fill) if any(pairs) else x
    for axis in along:  # one gather per axis, since torch's modes support fewer ranks
        n, low, high = x.shape[axis], before[axis], after[axis]
        if low or high:
            x = x.index_select(axis, _mirror(mode, n, low, high).to(x.device))
    return x


op("Pad", 2)(by_attributes(pad, "pads", "value"))
op("Pad", 1)(by_attributes(pad, "paddings", "value"))


@op("CenterCropPad", 18, known=(1,))
def center_crop_pad(node: Node, x: Tensor, shape: np.ndarray) -> Tensor:
    """Run ONNX CenterCropPad: crop each of ``axes`` (all if absent) to its middle, or pad it with zeros on both sides,
    to the sizes in ``shape``."""
    axes = ints(node, "axes") or tuple(range(x.dim()))
    pairs = [0] * (2 * x.dim())
    for axis, wanted in zip(axes, known_ints(shape) or (), strict=True):
        more = wanted - x.shape[axis]
        # Of an odd difference the smaller half is at the front.
        before = more // 2 if more >= 0 else -(-more // 2)
        at = 2 * (x.dim() - 1 - axis % x.dim())
        pairs[at : at + 2] = before, more - before
    return F.pad(x, pairs) if any(pairs) else x


@op("Trilu", 14, known=(1,))
def trilu(node: Node, x: Tensor, k: Known = None) -> Tensor:
    """Run ONNX Trilu: keep the upper triangle of the last two axes from diagonal ``k`` (None: 0), or the lower up to
    it."""
    at = 0 if k is None else int(k.reshape(()))
    return torch.triu(x, at) if integer(node, "upper", 1) else torch.tril(x, at)
