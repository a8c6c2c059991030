"""Implementations of ONNX ops on torch tensors: reductions, cumulative sums, softmax and matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import Known, integer, ints, known_ints, number, op, present, text

# ------------------------------------------------------------------ reductions

Reduction = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _extreme(function: Reduction, of_none: float) -> Reduction:
    """Return a reduction that computes maxima or minima, also of tensors without elements, which torch refuses. Their
    result is ``of_none``, an infinity, or for integers the end of the type."""

    def run(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        """Reduce ``axes`` of ``x``; ``keep``: whether they stay with size 1."""
        if x.numel():
            return (
                function(x.to(torch.uint8), axes, keep).to(x.dtype)
                if x.dtype == torch.bool
                else function(x, axes, keep)
            )
        shape = [1 if a in axes else n for a, n in enumerate(x.shape) if keep or a not in axes]
        end = of_none if x.is_floating_point() else _type_end(x.dtype, of_none)
        return torch.full(shape, end, dtype=x.dtype, device=x.device)

    return run


def _type_end(dtype: torch.dtype, sign: float) -> float:
    if dtype == torch.bool:
        return float(sign > 0)
    return float(torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min)


def _log_sum_exp(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    exact = x if x.is_floating_point() else x.double()
    return torch.logsumexp(exact, axes, keep).to(x.dtype)


def _mean(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.mean(axes, keep) if x.is_floating_point() else x.double().mean(axes, keep).to(x.dtype)


def _sum(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.sum(x, axes, keep, dtype=x.dtype)


def _norm(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    exact = x if x.is_floating_point() else x.double()
    norm: Tensor = torch.linalg.vector_norm(exact, 2, axes, keep)
    return norm.to(x.dtype)


REDUCTIONS: dict[tuple[str, tuple[int, ...]], tuple[int, Reduction]] = {
    # (op, the opsets in which it changed): (the first opset in which axes are an input, the function)
    ("ReduceL1", (1, 11, 13, 18)): (18, lambda x, axes, keep: _sum(x.abs(), axes, keep)),
    ("ReduceL2", (1, 11, 13, 18)): (18, _norm),
    ("ReduceLogSum", (1, 11, 13, 18, 28)): (18, lambda x, axes, keep: _sum(x, axes, keep).log().to(x.dtype)),
    ("ReduceLogSumExp", (1, 11, 13, 18, 28)): (18, _log_sum_exp),
    ("ReduceMax", (1, 11, 12, 13, 18, 20)): (18, _extreme(torch.amax, -math.inf)),
    ("ReduceMean", (1, 11, 13, 18)): (18, _mean),
    ("ReduceMin", (1, 11, 12, 13, 18, 20)): (18, _extreme(torch.amin, math.inf)),
    ("ReduceProd", (1, 11, 13, 18)): (18, _product),
    ("ReduceSum", (1, 11, 13)): (13, _sum),
    ("ReduceSumSquare", (1, 11, 13, 18)): (18, lambda x, axes, keep: _sum(x * x, axes, keep)),
}


def _by_attribute(function: Reduction) -> Callable[[Node, Tensor], Tensor]:
    def run(node: Node, x: Tensor) -> Tensor:
        return _reduced(node, x, ints(node, "axes"), function)

    return run


def _by_input(function: Reduction) -> Callable[..., Tensor]:
    def run(node: Node, x: Tensor, axes: Known = None) -> Tensor:
        wanted = known_ints(axes) or None
        if wanted is None and integer(node, "noop_with_empty_axes", 0):
            return _reduced(node, x.unsqueeze(0), (0,), function, keep=False)
        return _reduced(node, x, wanted, function)

    return run


def _reduced(
    node: Node, x: Tensor, axes: tuple[int, ...] | None, function: Reduction, keep: bool | None = None
) -> Tensor:
    keep = bool(integer(node, "keepdims", 1)) if keep is None else keep
    if x.dim() == 0:
        return function(x.unsqueeze(0), (0,), False)
    every = tuple(range(x.dim())) if axes is None else tuple(a % x.dim() for a in axes)
    return function(x, every, keep)


for (_op, _since), (_form, _reduction) in REDUCTIONS.items():
    op(_op, *(v for v in _since if v < _form))(_by_attribute(_reduction))
    op(_op, *(v for v in _since if v >= _form), known=(1,))(_by_input(_reduction))


def _arg_extreme(node: Node, x: Tensor, function: Callable[..., Tensor]) -> Tensor:
    axis, keep = integer(node, "axis", 0), bool(integer(node, "keepdims", 1))
    if not integer(node, "select_last_index", 0):
        return function(x, axis, keep)
    last: Tensor = x.shape[axis] - 1 - function(x.flip(axis), axis, keep)
    return last


@op("ArgMax", 1, 11, 12, 13)
def arg_max(node: Node, x: Tensor) -> Tensor:
    """Run ONNX ArgMax along ``axis``: of equal maxima the first, or the last if ``select_last_index`` is set."""
    return _arg_extreme(node, x, torch.argmax)


@op("ArgMin", 1, 11, 12, 13)
def arg_min(node: Node, x: Tensor) -> Tensor:
    """Run ONNX ArgMin along ``axis``: of equal minima the first, or the last if ``select_last_index`` is set."""
    return _arg_extreme(node, x, torch.argmin)


@op("CumSum", 11, 14, known=(1,))
def cumulative_sum(node: Node, x: Tensor, axis: Known) -> Tensor:
    """Run ONNX CumSum: the running sum along ``axis``, from the end with ``reverse``, without the own element with
    ``exclusive``."""
    return _cumulative(node, x, axis, torch.cumsum, 0)


@op("CumProd", 26, known=(1,))
def cumulative_product(node: Node, x: Tensor, axis: Known) -> Tensor:
    """Run ONNX CumProd: the running product along ``axis``, from the end with ``reverse``, without the own element with
    ``exclusive``."""
    return _cumulative(node, x, axis, torch.cumprod, 1)


def _cumulative(
    node: Node, x: Tensor, axis: Known, function: Callable[..., Tensor], neutral: float
) -> Tensor:
    """Return ``function`` (`torch.cumsum` or `torch.cumprod`) of ``x`` along ``axis``, from the end with ``reverse``,
    without the own element with ``exclusive``. ``neutral``: the result of no elements."""
    at = (known_ints(axis) or (0,))[0]
    x = x.flip(at) if integer(node, "reverse", 0) else x
    if integer(node, "exclusive", 0):
        # Elements are moved by one behind the neutral one. Subtracting the own element would lose digits.
        sizes = [1 if k == at % x.dim() else n for k, n in enumerate(x.shape)]
        x = torch.cat([x.new_full(sizes, neutral), x], at).narrow(at, 0, x.shape[at])
    y = function(x, at, dtype=x.dtype)
    return y.flip(at) if integer(node, "reverse", 0) else y


# ------------------------------------------------------------------ softmax


def softmax(x: Tensor, axis: int) -> Tensor:
    """Return the softmax of ``x`` along ``axis``. It is torch's softmax, except for float16: there each step is rounded
    to float16, as in ONNX's definition."""
    if x.dtype != torch.float16:
        return torch.softmax(x, axis)
    raised = torch.exp(x - x.detach().amax(axis, keepdim=True))
    return raised / raised.sum(axis, keepdim=True)


def hardmax(x: Tensor, axis: int) -> Tensor:
    """Return 1 at the first maximum of ``x`` along ``axis``, 0 elsewhere."""
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)


SOFTMAX: dict[str, Callable[..., Tensor]] = {
    "Hardmax": hardmax,
    "LogSoftmax": torch.log_softmax,
    "Softmax": softmax,
}


def _softmax(function: Callable[..., Tensor]) -> Callable[[Node, Tensor], Tensor]:
    return lambda node, x: function(x, integer(node, "axis", -1))


def _flat_softmax(function: Callable[..., Tensor]) -> Callable[[Node, Tensor], Tensor]:
    """Return Softmax or another function of opsets before 13, which work on all axes from ``axis`` on together."""

    def run(node: Node, x: Tensor) -> Tensor:
        axis = integer(node, "axis", 1) % max(x.dim(), 1)
        return function(x, -1) if axis == x.dim() - 1 else function(x.flatten(axis), -1).reshape(x.shape)

    return run


for _op, _function in SOFTMAX.items():
    op(_op, 13)(_softmax(_function))
    op(_op, 1, 11)(_flat_softmax(_function))


# ------------------------------------------------------------------ matrix products


@op("MatMul", 1, 9, 13)
def mat_mul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Run ONNX MatMul: NumPy's matrix product, with broadcasting of leading axes."""
    return torch.matmul(a, b)


@op("Gemm", 1, 6, 7, 9, 11, 13)
def gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """Run ONNX Gemm: ``alpha · A·B + beta · C``, with ``transA``, ``transB``, and ``c`` broadcast or None. A plain
    linear layer runs as torch's linear."""
    alpha, beta = number(node, "alpha", 1.0), number(node, "beta", 1.0)
    a = a.t() if integer(node, "transA", 0) else a
    plain = alpha == beta == 1.0 and integer(node, "transB", 0) and a.is_floating_point()
    if plain and (c is None or c.shape == b.shape[:1]):
        return F.linear(a, b, c)
    b = b.t() if integer(node, "transB", 0) else b
    if not a.is_floating_point():
        return _integer_gemm(torch.matmul(a, b), c, alpha, beta)
    if c is None:
        return torch.mm(a, b) if alpha == 1.0 else torch.mm(a, b) * alpha
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _integer_gemm(product: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    scaled = product if alpha == 1.0 else (product * alpha).to(product.dtype)
    if c is None:
        return scaled
    return scaled + (c if beta == 1.0 else (c * beta).to(product.dtype))


@op("Einsum", 12, 28)
def einsum(node: Node, *tensors: Tensor) -> Tensor:
    """Run ONNX Einsum: the sum of products of ``tensors`` that the attribute ``equation`` states."""
    return torch.einsum(text(node, "equation", ""), *present(tensors))


@op("Det", 11, 22)
def det(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Det: the determinants of the matrices in the last two axes."""
    result: Tensor = torch.linalg.det(x)
    return result
