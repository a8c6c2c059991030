"""ONNX ops for losses and random tensors, as functions on torch tensors; and the op table's entry for Gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import ROWS, Row, integer, ints, number, op, refuse, text
from rematplan.runtime.onnx.ops.values import ONNX_DTYPES

NEVER = -100  # torch's default of ignore_index, a number that is no class


@op("NegativeLogLikelihoodLoss", 12, 13, 22)
def nll_loss(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Run ONNX NegativeLogLikelihoodLoss on log-probabilities (N, C, …) and class numbers (N, …). A mean divides by
    the sum of the targets' weights."""
    ignored = integer(node, "ignore_index", NEVER)
    return F.nll_loss(
        x, target.long(), weight, ignore_index=ignored, reduction=text(node, "reduction", "mean")
    )


@op("SoftmaxCrossEntropyLoss", 12, 13)
def cross_entropy(
    node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor] | Tensor:
    """Run ONNX SoftmaxCrossEntropyLoss on scores (N, C, …) and class numbers (N, …). Return the loss and the
    log-softmax of the scores."""
    log_probability = F.log_softmax(x, 1)
    loss = nll_loss(node, log_probability, target, weight)
    return loss, log_probability


# ------------------------------------------------------------------ random tensors


def _dtype(node: Node, default: torch.dtype) -> torch.dtype:
    return ONNX_DTYPES[integer(node, "dtype", 1)] if "dtype" in node.attributes else default


def _normal(node: Node, x: Tensor) -> Tensor:
    return x * number(node, "scale", 1.0) + number(node, "mean", 0.0)


def _uniform(node: Node, x: Tensor) -> Tensor:
    low, high = number(node, "low", 0.0), number(node, "high", 1.0)
    return x * (high - low) + low


RANDOM: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[[Node, Tensor], Tensor]]] = {
    # the op: (draws a shape, draws like a tensor, scales what was drawn)
    "RandomNormal": (torch.randn, torch.randn_like, _normal),
    "RandomUniform": (torch.rand, torch.rand_like, _uniform),
}


def _of_shape(
    draw: Callable[..., Tensor], scale: Callable[[Node, Tensor], Tensor]
) -> Callable[[Node], Tensor]:
    return lambda node: scale(node, draw(ints(node, "shape") or (), dtype=_dtype(node, torch.float32)))


def _alike(draw: Callable[..., Tensor], scale: Callable[[Node, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda node, x: scale(node, draw(x, dtype=_dtype(node, x.dtype)))


for _op, (_draw, _draw_like, _scale) in RANDOM.items():
    op(_op, 1, 22, random=True)(_of_shape(_draw, _scale))
    op(f"{_op}Like", 1, 22, random=True)(_alike(_draw_like, _scale))


@op("Bernoulli", 15, 22, random=True)
def bernoulli(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Bernoulli: draw 1 with the input as probability, else 0, in ``dtype`` (by default the input's)."""
    return torch.bernoulli(x).to(_dtype(node, x.dtype))


DOMAIN = "ai.onnx.preview.training"


def _alone(node: Node, *tensors: Tensor) -> Tensor:
    raise refuse(node, "it has no meaning without its graph")


ROWS.append(Row(DOMAIN, "Gradient", 1, _alone))
