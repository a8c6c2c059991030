"""Elementwise ONNX ops (arithmetic, activations, comparisons) as functions on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import integer, number, op, present, text
from rematplan.runtime.onnx.ops.values import WIDER, signed

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Any, Any], Tensor]


# ------------------------------------------------------------------ one tensor in, one out

UNARY: dict[tuple[str, tuple[int, ...]], Unary] = {
    ("Abs", (1, 6, 13)): torch.abs,
    ("Acos", (7, 22)): torch.acos,
    ("Acosh", (9, 22)): torch.acosh,
    ("Asin", (7, 22)): torch.asin,
    ("Asinh", (9, 22)): torch.asinh,
    ("Atan", (7, 22)): torch.atan,
    ("Atanh", (9, 22)): torch.atanh,
    ("BitwiseNot", (18,)): lambda x: _unsigned(torch.bitwise_not, x),
    ("Ceil", (1, 6, 13)): torch.ceil,
    ("Cos", (7, 22)): torch.cos,
    ("Cosh", (9, 22)): torch.cosh,
    ("Erf", (9, 13)): torch.erf,
    ("Exp", (1, 6, 13)): torch.exp,
    ("Floor", (1, 6, 13)): torch.floor,
    ("HardSwish", (14, 22)): F.hardswish,
    ("IsNaN", (9, 13, 20)): torch.isnan,
    ("Log", (1, 6, 13)): torch.log,
    ("Mish", (18, 22)): F.mish,
    ("Neg", (1, 6, 13)): torch.neg,
    ("Not", (1,)): torch.logical_not,
    ("Reciprocal", (1, 6, 13)): torch.reciprocal,
    ("Relu", (1, 6, 13, 14)): torch.relu,
    ("Round", (11, 22)): torch.round,
    ("Sigmoid", (1, 6, 13)): torch.sigmoid,
    ("Sign", (9, 13)): torch.sign,
    ("Sin", (7, 22)): torch.sin,
    ("Sinh", (9, 22)): torch.sinh,
    ("Softplus", (1, 22)): F.softplus,
    ("Softsign", (1, 22)): F.softsign,
    ("Sqrt", (1, 6, 13)): torch.sqrt,
    ("Tan", (7, 22)): torch.tan,
    ("Tanh", (1, 6, 13)): torch.tanh,
}


def _unary(function: Unary) -> Callable[[Node, Tensor], Tensor]:
    return lambda node, x: function(x)


for (_op, _since), _function in UNARY.items():
    op(_op, *_since)(_unary(_function))


@op("Elu", 1, 6, 22)
def elu(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Elu: x where x ≥ 0, else ``alpha (eˣ − 1)``."""
    return F.elu(x, number(node, "alpha", 1.0))


@op("Celu", 12, 28)
def celu(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Celu: x where x ≥ 0, else ``alpha (exp(x / alpha) − 1)``."""
    return F.celu(x, number(node, "alpha", 1.0))


@op("Selu", 1, 6, 22)
def selu(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Selu: ``gamma x`` where x > 0, else ``gamma alpha (eˣ − 1)``. ``alpha`` and ``gamma`` are attributes."""
    alpha, gamma = (
        number(node, "alpha", 1.67326319217681884765625),
        number(node, "gamma", 1.05070102214813232421875),
    )
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0)))


@op("Gelu", 20)
def gelu(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Gelu: x Φ(x), with Φ the normal distribution function, or its tanh approximation."""
    return F.gelu(x, approximate=text(node, "approximate", "none"))


@op("LeakyRelu", 1, 6, 16)
def leaky_relu(node: Node, x: Tensor) -> Tensor:
    """Run ONNX LeakyRelu: x where x ≥ 0, else ``alpha x``."""
    return F.leaky_relu(x, number(node, "alpha", 0.01))


@op("ThresholdedRelu", 10, 22)
def thresholded_relu(node: Node, x: Tensor) -> Tensor:
    """Run ONNX ThresholdedRelu: x where x > ``alpha``, else 0."""
    return F.threshold(x, number(node, "alpha", 1.0), 0.0)


@op("HardSigmoid", 1, 6, 22)
def hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    """Run ONNX HardSigmoid: ``alpha x + beta``, clamped to [0, 1]."""
    return (x * number(node, "alpha", 0.2) + number(node, "beta", 0.5)).clamp(0, 1)


@op("Shrink", 9)
def shrink(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Shrink: ``x + bias`` below −``lambd``, ``x − bias`` above ``lambd``, zero between."""
    bias, edge = number(node, "bias", 0.0), number(node, "lambd", 0.5)
    zero = torch.zeros_like(x)
    return torch.where(x < -edge, (x + bias).to(x.dtype), torch.where(x > edge, (x - bias).to(x.dtype), zero))


@op("Swish", 24)
def swish(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Swish: ``x σ(alpha x)``, with σ the logistic sigmoid."""
    alpha = number(node, "alpha", 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@op("SwiGLU", 28)
def swiglu(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Run ONNX SwiGLU: ``a σ(alpha a) b``, with σ the logistic sigmoid."""
    return swish(node, a) * b


@op("PRelu", 7, 9, 16)
def prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    """Run ONNX PRelu: x where x ≥ 0, else ``slope · x``. ``slope`` is broadcast to the input's shape."""
    return torch.where(x < 0, x * slope, x)


@op("PRelu", 1, 6)
def prelu_by_channel(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    """Run ONNX PRelu of opsets below 7: x where x ≥ 0, else ``slope · x``, one slope per channel or one for all."""
    return F.prelu(x, slope)


@op("IsInf", 10, 20)
def is_inf(node: Node, x: Tensor) -> Tensor:
    """Run ONNX IsInf: true at +∞ unless ``detect_positive`` is 0, and at −∞ unless ``detect_negative`` is 0."""
    found = torch.zeros_like(x, dtype=torch.bool)
    if integer(node, "detect_positive", 1):
        found = found | (x == math.inf)
    if integer(node, "detect_negative", 1):
        found = found | (x == -math.inf)
    return found


@op("Clip", 11, 12, 13, scalars=True)
def clip(node: Node, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """Run ONNX Clip: clamp to ``low`` and ``high``, each of which may be None. If low > high, ``high`` wins."""
    if low is None and high is None:
        return x
    bounds = [b.to(x.dtype) if isinstance(b, Tensor) else b for b in (low, high)]
    if any(isinstance(b, Tensor) for b in bounds):
        x = x if bounds[0] is None else torch.maximum(x, _as_tensor(bounds[0], x))
        return x if bounds[1] is None else torch.minimum(x, _as_tensor(bounds[1], x))
    return torch.clamp(x, *bounds)


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)


@op("Clip", 1, 6)
def clip_by_attributes(node: Node, x: Tensor) -> Tensor:
    """Run ONNX Clip of opsets below 11: clamp to the attributes ``min`` and ``max``, each of which may be absent."""
    return torch.clamp(x, number(node, "min", -math.inf), number(node, "max", math.inf))


# ------------------------------------------------------------------ two tensors in, one out


def _divide(a: Any, b: Any) -> Tensor:
    exact = any(isinstance(v, Tensor) and not v.is_floating_point() and not v.is_complex() for v in (a, b))
    return torch.div(a, b, rounding_mode="trunc") if exact else torch.div(a, b)


def _power(a: Any, b: Any) -> Tensor:
    """Return ``a`` to the power ``b``, each a tensor or a number. If ``a`` is a tensor, the result has its type."""
    if not isinstance(a, Tensor):
        return torch.pow(a, b)
    if isinstance(b, (int, float)) and not a.is_floating_point() and float(b).is_integer() and b >= 0:
        return torch.pow(a, int(b))
    return torch.pow(a, b).to(a.dtype)


def _subtract(a: Any, b: Any) -> Tensor:
    return torch.sub(a, b) if isinstance(a, Tensor) else torch.rsub(b, a)


BINARY: dict[str, tuple[tuple[int, ...], tuple[int, ...], Binary]] = {
    # the op: (opsets in which ``axis`` may align the operands, later ones, the function)
    "Add": ((1, 6), (7, 13, 14), torch.add),
    "And": ((1,), (7,), torch.logical_and),
    "BitwiseAnd": ((), (18,), torch.bitwise_and),
    "BitwiseOr": ((), (18,), torch.bitwise_or),
    "BitwiseXor": ((), (18,), torch.bitwise_xor),
    "Div": ((1, 6), (7, 13, 14), _divide),
    "Equal": ((1,), (7, 11, 13, 19), torch.eq),
    "Greater": ((1,), (7, 9, 13), torch.gt),
    "GreaterOrEqual": ((), (12, 16), torch.ge),
    "Less": ((1,), (7, 9, 13), torch.lt),
    "LessOrEqual": ((), (12, 16), torch.le),
    "Mul": ((1, 6), (7, 13, 14), torch.mul),
    "Or": ((1,), (7,), torch.logical_or),
    "Pow": ((1,), (7, 12, 13, 15), _power),
    "Sub": ((1, 6), (7, 13, 14), _subtract),
    "Xor": ((1,), (7,), torch.logical_xor),
}
# Functions that accept a number only as second operand: by function, the one to call with exchanged operands.
RIGHT_ONLY: dict[Binary, Binary] = {
    torch.eq: torch.eq,
    torch.gt: torch.lt,
    torch.ge: torch.le,
    torch.lt: torch.gt,
    torch.le: torch.ge,
    torch.add: torch.add,
    torch.mul: torch.mul,
    torch.bitwise_and: torch.bitwise_and,
    torch.bitwise_or: torch.bitwise_or,
    torch.bitwise_xor: torch.bitwise_xor,
}
TENSORS_ONLY: frozenset[Binary] = frozenset({torch.logical_and, torch.logical_or, torch.logical_xor})


def _apply(function: Binary, a: Any, b: Any) -> Tensor:
    """Apply a torch function to two operands, at least one a tensor and the other maybe a number."""
    if isinstance(a, Tensor) and a.dtype in WIDER:
        return _unsigned(function, a, _as_tensor(b, a))
    if isinstance(b, Tensor) and b.dtype in WIDER:
        return _unsigned(function, _as_tensor(a, b), b)
    if not isinstance(b, Tensor) and function in TENSORS_ONLY:
        b = _as_tensor(b, a)
    if not isinstance(a, Tensor):
        # Functions that take a number as second operand get exchanged operands, or a tensor of the number.
        if function in RIGHT_ONLY:
            return RIGHT_ONLY[function](b, a)
        if function is not _subtract and function is not _power:
            a = _as_tensor(a, b)
    return function(a, b)


COMPARISONS: frozenset[Any] = frozenset({torch.eq, torch.gt, torch.ge, torch.lt, torch.le})


def _unsigned(function: Any, *operands: Tensor) -> Tensor:
    """Apply a torch function to unsigned integers of 16 to 64 bits by signed arithmetic. The result has the first
    operand's type; comparisons give booleans."""
    dtype = operands[0].dtype
    if function in COMPARISONS:
        result: Tensor = function(*(signed(x) for x in operands))
        return result
    if function in (torch.maximum, torch.minimum):
        ordered: Tensor = function(*(signed(x) for x in operands))
        flip = torch.iinfo(torch.int64).min if dtype == torch.uint64 else 0
        return (ordered ^ flip).view(dtype) if flip else ordered.to(dtype)
    if dtype != torch.uint64:
        wide: Tensor = function(*(x.to(WIDER[x.dtype]) if x.dtype in WIDER else x for x in operands))
        return wide.to(dtype)
    plain = [x.view(torch.int64) if x.dtype == dtype else x for x in operands]
    if function in (_divide, torch.remainder, torch.fmod):
        quotient = _unsigned_quotient(*plain)
        return (quotient if function is _divide else plain[0] - quotient * plain[1]).view(dtype)
    whole: Tensor = function(*plain)
    return whole.view(dtype)


def _unsigned_quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return the bits of the unsigned quotient of 64-bit integers stored as int64 (Hacker's Delight, 9-3)."""
    low = torch.iinfo(torch.int64).min
    half = (a >> 1) & ~low
    quotient = torch.div(half, b, rounding_mode="trunc") << 1
    rest = a - quotient * b
    quotient = quotient + ((rest ^ low) >= (b ^ low)).to(torch.int64)
    return torch.where(b < 0, ((a ^ low) >= (b ^ low)).to(torch.int64), quotient)


def _binary(function: Binary) -> Callable[[Node, Any, Any], Tensor]:
    return lambda node, a, b: _apply(function, a, b)


def _legacy(function: Binary) -> Callable[[Node, Any, Any], Tensor]:
    """Return what runs a binary op of opsets below 7, where ``axis`` may align the second operand's first axis."""

    def run(node: Node, a: Any, b: Any) -> Tensor:
        axis = node.attributes.get("axis")
        if integer(node, "broadcast", 0) and axis is not None and isinstance(b, Tensor):
            b = b.reshape(*b.shape, *[1] * (a.dim() - integer(node, "axis", 0) % a.dim() - b.dim()))
        return _apply(function, a, b)

    return run


for _op, (_older, _since, _pair) in BINARY.items():
    op(_op, *_older, scalars=True)(_legacy(_pair))
    op(_op, *_since, scalars=True)(_binary(_pair))


@op("Mod", 10, 13, 28)
def mod(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Run ONNX Mod: the remainder of a ÷ b with the sign of b; with the attribute ``fmod``, with the sign of a."""
    function = torch.fmod if integer(node, "fmod", 0) else torch.remainder
    return _unsigned(function, a, b) if a.dtype in WIDER else function(a, b)


@op("BitShift", 11, 28)
def bit_shift(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Run ONNX BitShift: shift integers ``a`` by ``b`` bits, left or right by the attribute ``direction``."""
    whole, by = a.to(torch.int64), b.to(torch.int64)
    if text(node, "direction", "LEFT") == "LEFT":
        return (whole << by).to(a.dtype)
    if a.dtype != torch.uint64:
        return (whole >> by).to(a.dtype)
    # Shifts of int64 repeat the highest bit. So the first one clears it.
    halved = (whole >> 1) & torch.iinfo(torch.int64).max
    return torch.where(by > 0, halved >> (by - 1).clamp(min=0), whole).to(a.dtype)


@op("Where", 9, 16, scalars=True)
def where(node: Node, condition: Any, a: Any, b: Any) -> Tensor:
    """Run ONNX Where: elements of ``a`` where ``condition`` is true, else of ``b``, with broadcasting."""
    like = next((v for v in (a, b) if isinstance(v, Tensor)), None)
    if like is not None:
        a, b = (_as_tensor(v, like) if not isinstance(v, Tensor) else v for v in (a, b))
    if not isinstance(condition, Tensor):
        condition = torch.full((), bool(condition), device=None if like is None else like.device)
    return torch.where(condition, a, b)


VARIADIC: dict[tuple[str, tuple[int, ...]], Callable[[Tensor, Tensor], Tensor]] = {
    ("Max", (1, 6, 8, 12, 13)): torch.maximum,
    ("Min", (1, 6, 8, 12, 13)): torch.minimum,
    ("Sum", (1, 6, 8, 13)): torch.add,
}


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def both(a: Tensor, b: Tensor) -> Tensor:
        return _unsigned(function, a, b) if a.dtype in WIDER else function(a, b)

    return lambda node, *tensors: reduce(both, present(tensors))


for (_op, _since), _fold in VARIADIC.items():
    op(_op, *_since)(_variadic(_fold))


@op("Mean", 1, 6, 8, 13)
def mean(node: Node, *tensors: Tensor) -> Tensor:
    """Run ONNX Mean: the elementwise mean of several tensors, with broadcasting."""
    found = present(tensors)
    return reduce(torch.add, found) / len(found)
