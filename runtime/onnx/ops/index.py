"""ONNX ops for indexing (gather, scatter, one-hot, top-k) as functions on torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.graph.index_to_slice import Slice, picked_slice
from rematplan.runtime.onnx.ops.rows import by_attributes, integer, op, refuse, text
from rematplan.runtime.onnx.ops.values import SAME_WIDTH, WIDER, constant_tensor, signed

# ------------------------------------------------------------------ gathering and scattering


def _wrapped(indices: Tensor, n: int) -> Tensor:
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + n, indices)


def _sliced(x: Tensor, at: Slice) -> Tensor:
    view: Tensor = torch.ops.aten.slice(x, at.dim, at.start, at.end, at.step)
    return view


@op("Gather", 1, 11, 13, literal=(1,))
def gather(node: Node, x: Tensor, indices: Any) -> Tensor:
    """Run ONNX Gather: select slices of ``x`` along ``axis`` by index. Evenly spaced indices that are known during
    capture give a view."""
    axis = integer(node, "axis", 0) % x.dim()
    if isinstance(indices, np.ndarray):
        if indices.ndim == 0:
            return x.select(axis, int(indices))
        if (at := picked_slice([*[None] * axis, indices], x.shape)) and indices.ndim == 1:
            return _sliced(x, at)
        indices = constant_tensor(indices, f"{node.name!r}'s indices").to(x.device)
    flat = _wrapped(indices, x.shape[axis])
    if axis == 0 and x.dim() == 2 and x.is_floating_point() and flat.dim() > 0:
        return F.embedding(flat, x)
    picked = x.index_select(axis, flat.reshape(-1))
    return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@op("GatherElements", 11, 13)
def gather_elements(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    """Run ONNX GatherElements: select elements of ``x`` by index along ``axis``; the result has the indices' shape."""
    axis = integer(node, "axis", 0)
    return torch.gather(x, axis, _wrapped(indices, x.shape[axis]))


@op("GatherND", 11, 12, 13)
def gather_nd(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    """Run ONNX GatherND: select slices of ``x`` by the tuples of indices in the last axis of ``indices``, after
    ``batch_dims`` common axes."""
    batch = integer(node, "batch_dims", 0)
    if not batch and indices.shape[-1] == 1:
        rows = x.index_select(0, _wrapped(indices, x.shape[0]).reshape(-1))
        return rows.reshape((*indices.shape[:-1], *x.shape[1:]))
    flat = x.reshape(-1, *x.shape[batch:]) if batch else x.unsqueeze(0)
    tuples = indices.reshape(flat.shape[0], -1, indices.shape[-1])
    rows = torch.arange(flat.shape[0], device=x.device).unsqueeze(1).expand(tuples.shape[:2])
    parts = [_wrapped(p, flat.shape[k + 1]) for k, p in enumerate(tuples.unbind(-1))]
    found = flat[(rows, *parts)]
    return found.reshape((*indices.shape[:-1], *found.shape[2:]))


@op("ReverseSequence", 10, 28)
def reverse_sequence(node: Node, x: Tensor, lengths: Tensor) -> Tensor:
    """Run ONNX ReverseSequence: in each batch entry i, reverse the first ``lengths[i]`` steps along ``time_axis``.
    Later steps are not moved."""
    time, batch = integer(node, "time_axis", 0), integer(node, "batch_axis", 1)
    steps = torch.arange(x.shape[time], device=x.device).unsqueeze(1)
    ends = lengths.to(torch.int64).unsqueeze(0)
    places = torch.where(steps < ends, ends - 1 - steps, steps)  # (steps, samples)
    places = places if time < batch else places.t()
    places = places.reshape(*places.shape, *[1] * (x.dim() - 2)).expand(x.shape)
    return torch.gather(x, time, places)


@op("TensorScatter", 24)
def tensor_scatter(node: Node, cache: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    """Run ONNX TensorScatter: return a copy of ``cache`` with ``update`` along ``axis`` from each batch entry's start,
    0 for None. In the ``mode`` circular, positions after the end continue at 0."""
    axis = integer(node, "axis", -2) % cache.dim()
    places = torch.arange(update.shape[axis], device=cache.device).unsqueeze(0)
    if starts is not None:
        places = places + starts.reshape(-1, 1)
    if text(node, "mode", "linear") == "circular":
        places = places % cache.shape[axis]
    shape = [n if at in (0, axis) else 1 for at, n in enumerate(update.shape)]
    shape[0] = places.shape[0]
    return cache.scatter(axis, places.reshape(shape).expand(update.shape), update)


SCATTER_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@op("ScatterElements", 11, 13, 16, 18, literal=(1,))
def scatter_elements(node: Node, x: Tensor, indices: Any, updates: Tensor) -> Tensor:
    """Run ONNX ScatterElements: return a copy of ``x`` with ``updates`` at positions along ``axis``, combined by
    ``reduction``; `ModelError` for an unknown one. Known indices of a slice are written with ``slice_scatter`` if there
    is no reduction."""
    axis, how = integer(node, "axis", 0) % max(x.dim(), 1), text(node, "reduction", "none")
    if isinstance(indices, np.ndarray):
        at = _written_slice(indices, axis, x.shape) if how == "none" else None
        if at is not None:
            return torch.slice_scatter(x, updates, at.dim, at.start, at.end, at.step)
        indices = constant_tensor(indices, f"{node.name!r}'s indices").to(x.device)
    places = _wrapped(indices, x.shape[axis])
    if how == "none":
        return x.scatter(axis, places, updates)
    if how not in SCATTER_REDUCTIONS:
        raise refuse(node, f"reduction is {how!r}")
    return x.scatter_reduce(axis, places, updates, SCATTER_REDUCTIONS[how])


def _written_slice(indices: np.ndarray[Any, Any], axis: int, shape: torch.Size) -> Slice | None:
    """Return the slice that the indices of a ScatterElements select, or None unless they select the same one at all
    positions of the other axes."""
    if (
        not indices.ndim
        or not indices.size
        or np.delete(indices.shape, axis).tolist() != [*shape[:axis], *shape[axis + 1 :]]
    ):
        return None
    lines = np.moveaxis(indices, axis, -1).reshape(-1, indices.shape[axis])
    return picked_slice([*[None] * axis, lines[0]], shape) if (lines == lines[0]).all() else None


@op("Scatter", 9, 11, literal=(1,))
def scatter(node: Node, x: Tensor, indices: Any, updates: Tensor) -> Tensor:
    """Run ONNX Scatter, the former name of ScatterElements: see `scatter_elements`."""
    return scatter_elements(node, x, indices, updates)


@op("ScatterND", 11, 13, 16, 18, literal=(1,))
def scatter_nd(node: Node, x: Tensor, indices: Any, updates: Tensor) -> Tensor:
    """Run ONNX ScatterND: return a copy of ``x`` with ``updates`` at the tuples of indices, combined by ``reduction``;
    `ModelError` for an unknown one. Known indices of a slice are written with ``slice_scatter`` if there is no
    reduction."""
    how, depth = text(node, "reduction", "none"), indices.shape[-1]
    if isinstance(indices, np.ndarray):
        at = picked_slice(list(indices.reshape(-1, depth).T), x.shape) if indices.size else None
        if at is not None and how == "none":
            return torch.slice_scatter(
                x, updates.reshape(_sliced(x, at).shape), at.dim, at.start, at.end, at.step
            )
        indices = constant_tensor(indices, f"{node.name!r}'s indices").to(x.device)
    parts = tuple(_wrapped(p, x.shape[k]).reshape(-1) for k, p in enumerate(indices.unbind(-1)))
    rows = updates.reshape(-1, *x.shape[depth:])
    if how in ("none", "add"):
        return x.index_put(parts, rows, accumulate=how == "add")
    if how not in SCATTER_REDUCTIONS:
        raise refuse(node, f"reduction is {how!r}")
    flat = x.reshape(-1, *x.shape[depth:])
    place = torch.zeros_like(parts[0])
    for part, n in zip(parts, x.shape, strict=False):
        place = place * n + part
    place = place.reshape(-1, *[1] * (rows.dim() - 1)).expand(rows.shape)
    return flat.scatter_reduce(0, place, rows, SCATTER_REDUCTIONS[how]).reshape(x.shape)


@op("OneHot", 9, 11, 28, known=(1,))
def one_hot(node: Node, indices: Tensor, depth: np.ndarray, values: Tensor) -> Tensor:
    """Run ONNX OneHot: ``values[1]`` at the index along a new axis of size ``depth``, else ``values[0]``. Negative
    indices count from the end."""
    n = int(depth.reshape(-1)[0])
    axis = integer(node, "axis", -1)
    axis = axis + indices.dim() + 1 if axis < 0 else axis
    whole = indices.to(torch.int64)
    wrapped = torch.where(whole < 0, whole + n, whole).unsqueeze(axis)
    places = torch.arange(n, device=indices.device).reshape(-1, *[1] * (indices.dim() - axis))
    return torch.where(wrapped == places, values[1], values[0])


@op("TopK", 10, 11, 24, known=(1,))
def top_k(node: Node, x: Tensor, k: np.ndarray) -> tuple[Tensor, Tensor]:
    """Run ONNX TopK: return the k largest or smallest elements along ``axis``, sorted, and their indices. Of equals
    the first comes first."""
    axis, n = integer(node, "axis", -1), int(k.reshape(-1)[0])
    order = torch.argsort(signed(x), dim=axis, descending=bool(integer(node, "largest", 1)), stable=True)
    places = order.narrow(axis, 0, n)
    if x.dtype in WIDER:
        return torch.gather(x.view(SAME_WIDTH[x.dtype]), axis, places).view(x.dtype), places
    return torch.gather(x, axis, places), places


op("TopK", 1)(by_attributes(top_k, "k"))


@op("Compress", 9, 11, 28)
def compress(node: Node, x: Tensor, condition: Tensor) -> Tensor:
    """Run ONNX Compress: select slices along ``axis``, or elements of the flattened ``x``, by ``condition``. Its
    values decide the result's shape."""
    axis = node.attributes.get("axis")
    x, at = (x.reshape(-1), 0) if axis is None else (x, integer(node, "axis", 0))
    return x.index_select(at, torch.nonzero(condition).reshape(-1))
