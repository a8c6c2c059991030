"""Implementations of ONNX ops that carry a state along a sequence: linear attention and causal convolution."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import integer, number, op, refuse, text

# For each update rule: whether the state decays; whether the value that the state predicts is subtracted from the
# new value.
RULES: dict[str, tuple[bool, bool]] = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}


def _heads(node: Node, x: Tensor, heads: int) -> Tensor:
    if heads < 1 or x.dim() != 3 or x.shape[2] % heads:
        raise refuse(node, f"{heads} heads do not divide an input of shape {tuple(x.shape)}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


@op("LinearAttention", 27)
def linear_attention(
    node: Node,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run ONNX LinearAttention: update each head's state (key size × value size) step by step, and multiply it by the
    query. ``past``: the first state; None: zeros. ``decay``: logarithms of the state's factors. ``beta``: factors of
    its change. Returns the result (batch, steps, features) and the last state. Raises `ModelError` if the rule or the
    numbers of heads do not fit."""
    rule = text(node, "update_rule", "gated_delta")
    heads, readers = integer(node, "kv_num_heads", 0), integer(node, "q_num_heads", 0)
    if rule not in RULES or RULES[rule] != (decay is not None, beta is not None):
        raise refuse(node, f"the rule {rule!r} does not fit its inputs")
    if heads < 1 or readers % heads:
        raise refuse(node, f"{heads} heads of keys do not divide {readers} of queries")
    q, k, v = _heads(node, query, readers), _heads(node, key, heads), _heads(node, value, heads)
    # ``decay``: logarithms of the state's factors, one for each key feature or one for each head. ``beta``:
    # factors of its change, for each key head or for all.
    kept = None if decay is None else _heads(node, decay, heads).exp()
    rates = None if beta is None else _heads(node, beta, beta.shape[2])
    shape = (q.shape[0], heads, k.shape[3], v.shape[3])
    state = q.new_zeros(shape) if past is None else past.to(q.dtype)
    read = []
    for t in range(q.shape[2]):
        state = _stepped(
            state, k[:, :, t], v[:, :, t], *(None if g is None else g[:, :, t] for g in (kept, rates))
        )
        seen = state.repeat_interleave(readers // heads, 1) if readers > heads else state
        read.append(torch.matmul(q[:, :, t].unsqueeze(2), seen).squeeze(2))
    scale = number(node, "scale", 0.0) or 1 / math.sqrt(k.shape[3])
    y = (torch.stack(read, 2) * scale).transpose(1, 2).flatten(2)
    return y.to(query.dtype), state.to(query.dtype if past is None else past.dtype)


def _stepped(state: Tensor, k: Tensor, v: Tensor, kept: Tensor | None, rate: Tensor | None) -> Tensor:
    if kept is not None:
        state = state * kept.unsqueeze(-1)
    if rate is not None:
        v = rate * (v - torch.matmul(k.unsqueeze(2), state).squeeze(2))
    return state + k.unsqueeze(-1) * v.unsqueeze(-2)


@op("CausalConvWithState", 27)
def causal_conv(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run ONNX CausalConvWithState: convolve each channel of (N, C, steps) with the present and earlier steps; a
    ``past`` of None is zeros. Returns the result and the last kernel − 1 steps. Raises `ModelError` for an unknown
    activation."""
    activation, back = text(node, "activation", "none"), weight.shape[2] - 1
    if activation not in ("none", "silu", "swish"):
        raise refuse(node, f"the activation {activation!r} is not supported")
    padded = F.pad(x, (back, 0)) if past is None else torch.cat([past, x], 2)
    y = F.conv1d(padded, weight, bias, groups=x.shape[1])
    # Copied, because an output must not be a view of an input.
    state = padded.narrow(2, padded.shape[2] - back, back).clone()
    return (y if activation == "none" else F.silu(y)), state
