"""Implementations of ONNX ops on positions: sampling at a grid, grids of affine maps, rotary embeddings and Col2Im."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import integer, ints, known_ints, op, refuse, text

# ONNX's names of the modes, older and newer, and torch's.
SAMPLE_MODES = {
    "bilinear": "bilinear",
    "linear": "bilinear",
    "nearest": "nearest",
    "bicubic": "bicubic",
    "cubic": "bicubic",
}
SAMPLE_PADS = ("zeros", "border", "reflection")


def _samples(node: Node) -> None:
    for name, default, known in (("mode", "linear", SAMPLE_MODES), ("padding_mode", "zeros", SAMPLE_PADS)):
        if text(node, name, default) not in known:
            raise refuse(node, f"{name} {text(node, name, default)!r} is not supported")


@op("GridSample", 16, 20, 22, check=_samples)
def grid_sample(node: Node, x: Tensor, grid: Tensor) -> Tensor:
    """Run ONNX GridSample: interpolate ``x`` (N, C, …) at the positions ``grid`` (N, …, axes), scaled to [−1, 1]."""
    mode = SAMPLE_MODES[text(node, "mode", "linear")]
    corners = bool(integer(node, "align_corners", 0))
    return F.grid_sample(x, grid, mode, text(node, "padding_mode", "zeros"), corners)


@op("AffineGrid", 20, known=(1,))
def affine_grid(node: Node, theta: Tensor, size: np.ndarray) -> Tensor:
    """Run ONNX AffineGrid on maps (N, 2, 3) or (N, 3, 4): images of a regular grid, (N, H, W, 2) or (N, D, H, W, 3)."""
    return F.affine_grid(theta, list(known_ints(size) or ()), bool(integer(node, "align_corners", 0)))


@op("RotaryEmbedding", 23)
def rotary_embedding(
    node: Node, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Run ONNX RotaryEmbedding on ``x`` (batch, heads, steps, size) or (batch, steps, heads·size): rotate pairs of
    features by position. ``cos``, ``sin``: (positions, pairs), or (batch, steps, pairs) without ``positions`` (batch,
    steps)."""
    heads = x.transpose(1, 2) if x.dim() == 4 else x.reshape(*x.shape[:2], integer(node, "num_heads", 1), -1)
    # Features after the first ``width`` of each head are not rotated.
    width = integer(node, "rotary_embedding_dim", 0) or heads.shape[3]
    turned, rest = heads[..., :width], heads[..., width:]
    if positions is not None:
        cos, sin = F.embedding(positions, cos), F.embedding(positions, sin)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if integer(node, "interleaved", 0):
        # Interleaved: a pair has two neighbours. Otherwise it has one feature of each half.
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    y = torch.cat([y, rest], -1) if rest.shape[3] else y
    return y.transpose(1, 2) if x.dim() == 4 else y.reshape(x.shape)


@op("Col2Im", 18, known=(1, 2))
def col2im(node: Node, x: Tensor, image: np.ndarray, block: np.ndarray) -> Tensor:
    """Run ONNX Col2Im: add up blocks (N, C · elements, blocks) at their places in an image (N, C, *image)."""
    sizes, kernel = known_ints(image) or (), known_ints(block) or ()
    rank = len(sizes)
    dilations, strides = (ints(node, k) or (1,) * rank for k in ("dilations", "strides"))
    pads = ints(node, "pads") or (0,) * (2 * rank)
    padded = [n + pads[a] + pads[rank + a] for a, n in enumerate(sizes)]
    places = torch.zeros((1,) * (2 * rank), dtype=torch.int64, device=x.device)  # axes: kernel, then blocks
    for a in range(rank):
        blocks = (padded[a] - dilations[a] * (kernel[a] - 1) - 1) // strides[a] + 1
        along = torch.arange(kernel[a], device=x.device).unsqueeze(1) * dilations[a]
        along = along + torch.arange(blocks, device=x.device) * strides[a]
        shape = [1] * (2 * rank)
        shape[a], shape[rank + a] = along.shape
        places = places * padded[a] + along.reshape(shape)
    columns = x.reshape(x.shape[0], x.shape[1] // math.prod(kernel), -1)
    whole = columns.new_zeros(*columns.shape[:2], math.prod(padded)).index_add(2, places.reshape(-1), columns)
    whole = whole.reshape(*columns.shape[:2], *padded)
    for a, n in enumerate(sizes):
        whole = whole.narrow(2 + a, pads[a], n)
    return whole
