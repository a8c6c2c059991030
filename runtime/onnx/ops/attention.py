"""The ONNX op Attention on torch tensors: scaled dot product attention with masks, caches, grouped heads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.reduce import softmax
from rematplan.runtime.onnx.ops.rows import integer, number, op, refuse
from rematplan.runtime.onnx.ops.values import ONNX_DTYPES

Inputs = tuple[Tensor, Tensor, Tensor]


@op("Attention", 23, 24, 25)
def attention(
    node: Node,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Run ONNX Attention on q, k and v of shape (batch, heads, steps, size) or (batch, steps, heads·size). Returns the
    result, keys and values with past ones, and the scores unless fused attention runs. Raises `ModelError` if heads do
    not divide flat features. ``lengths``: how many keys of each batch entry are no padding."""
    flat = q.dim() == 3
    if flat:
        kv = integer(node, "kv_num_heads", 0)
        q, k, v = (_split(node, x, n) for x, n in ((q, integer(node, "q_num_heads", 0)), (k, kv), (v, kv)))
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = (k, v)
    if q.shape[1] != k.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    wants_scores = len(node.outputs) > 3 and bool(node.outputs[3])
    if _is_plain(node, q, mask) and not wants_scores and lengths is None:
        causal = bool(integer(node, "is_causal", 0)) and mask is None and not past
        bias = None if causal else _bias(node, q, k, mask, past, lengths)
        y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=_scale(node, q))
        scores = None
    else:
        y, scores = _by_hand(node, (q, k, v), _bias(node, q, k, mask, past, lengths))
    y = y.transpose(1, 2).flatten(2) if flat else y
    return (y, *present) if scores is None else (y, *present, scores)


def _split(node: Node, x: Tensor, heads: int) -> Tensor:
    if heads < 1 or x.shape[2] % heads:
        raise refuse(node, f"{heads} heads do not divide {x.shape[2]} features")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def _scale(node: Node, q: Tensor) -> float:
    return number(node, "scale", 0.0) if "scale" in node.attributes else 1 / math.sqrt(q.shape[3])


def _is_plain(node: Node, q: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch's fused attention gives ONNX's result for the node."""
    windows = max(integer(node, f"{side}_window_size", -1) for side in ("left", "right"))
    # A boolean mask may forbid all keys of a query. In float16, ONNX rounds after each step, torch at the
    # end.
    special = windows >= 0 or bool(node.attributes.get("softcap")) or "softmax_precision" in node.attributes
    return not special and q.dtype != torch.float16 and (mask is None or mask.dtype == q.dtype)


def _bias(
    node: Node, q: Tensor, k: Tensor, mask: Tensor | None, past: int, lengths: Tensor | None
) -> Tensor | None:
    """Return what is added to the attention scores: the mask, and −∞ where a query may not attend to a key; None if
    nothing is added. ``past``: the number of cached keys; ignored if ``lengths`` states how many keys of each batch
    entry are no padding."""
    bias = None if mask is None else _additive(mask, q, k.shape[2])
    rows = torch.arange(q.shape[2], device=q.device).unsqueeze(1)
    columns = torch.arange(k.shape[2], device=q.device).unsqueeze(0)
    offset = lengths.reshape(-1, 1, 1, 1) - q.shape[2] if lengths is not None else past
    # Query i is at position i + offset among the keys.
    distance = rows + offset - columns
    allowed = []
    if integer(node, "is_causal", 0):
        allowed.append(distance >= 0)
    if (left := integer(node, "left_window_size", -1)) >= 0:
        allowed.append(distance <= left)
    if (right := integer(node, "right_window_size", -1)) >= 0:
        allowed.append(distance >= -right)
    if lengths is not None:
        allowed.append(columns < lengths.reshape(-1, 1, 1, 1))
    for part in allowed:
        stated = _additive(part, q, k.shape[2])
        bias = stated if bias is None else bias + stated
    return bias


def _additive(mask: Tensor, q: Tensor, keys: int) -> Tensor:
    """Return an attention mask as numbers to add to the scores, extended to ``keys`` keys. Forbidden keys, and keys
    beyond the mask's end, get −∞."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, zero, torch.full_like(zero, -math.inf))
    missing = keys - mask.shape[-1]
    return F.pad(mask, (0, missing), value=-math.inf) if missing > 0 else mask


def _by_hand(node: Node, inputs: Inputs, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute attention op by op. Return the result, and the scores as ``qk_matmul_output_mode`` says."""
    q, k, v = inputs
    # 0: products, 1: after the softcap, 2: after adding the bias, 3: after the softmax.
    stage = integer(node, "qk_matmul_output_mode", 0)
    root = torch.full((), math.sqrt(_scale(node, q)), dtype=q.dtype, device=q.device)
    scores = [torch.matmul(q * root, k.transpose(2, 3) * root)]
    cap = number(node, "softcap", 0.0)
    scores.append(torch.tanh(scores[0] / cap) * cap if cap > 0 else scores[0])
    scores.append(scores[1] if bias is None else scores[1] + bias)
    wide = (
        ONNX_DTYPES[integer(node, "softmax_precision", 1)]
        if "softmax_precision" in node.attributes
        else q.dtype
    )
    finite = scores[2].to(wide)
    if bias is not None:  # a query without allowed keys gets zeros, not NaN, also in its gradient
        blind = (bias == -math.inf).all(-1, keepdim=True)
        weights = softmax(finite.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    else:
        weights = softmax(finite, -1)
    weights = weights.to(q.dtype)
    return torch.matmul(weights, v), [*scores, weights][stage]
