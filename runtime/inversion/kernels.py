"""What an inverse runs: it makes a storage anew and fills it, whole or piece by piece, from later tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from rematplan.ir import ModelError
from rematplan.runtime.inversion.drift import passed_on

LEAST_SCALE = 1e-3
"""A scale with a smaller factor than this is not inverted: what is divided by it is mostly rounding errors."""

Kernel: TypeAlias = Callable[..., object]
"""Writes into ``out`` what it finds from tensors and constants. One that divides by a scale that training may change
returns by how much that makes errors larger (root of the mean square)."""


@dataclass(frozen=True, slots=True)
class Fill:
    """One piece of an inverse: a kernel of `KERNELS` writes the view of the storage that ``size``, ``stride`` and
    ``offset`` describe (in elements), from the next ``arity`` tensors. ``scale``: what the kernel
    returned when the plan was made, if it returns a number."""

    kernel: str
    constants: tuple[Any, ...]
    arity: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Inverse:
    """A function of tensors that gives a storage's first value back: of this size, stride and type.

    ``gain``: by how much it multiplies a relative error of what it reads. ``noise``: the relative error that its own
    rounding adds; 0 for one that only moves numbers, whose result is exact.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    fills: tuple[Fill, ...]
    gain: float
    noise: float

    @property
    def exact(self) -> bool:
        """Whether it brings back the very bits."""
        return self.noise == 0.0

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run it.

        Raises:
            ModelError: scales have changed since the plan was made, and now would make the result wrong.
        """
        base = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensors[0].device)
        at, drift = 0, 1.0
        for fill in self.fills:
            out = base.as_strided(fill.size, fill.stride, fill.offset)
            now = KERNELS[fill.kernel](out, *tensors[at : at + fill.arity], *fill.constants)
            if fill.scale and isinstance(now, float):
                drift = max(drift, now / fill.scale)
            at += fill.arity
        passed_on(tensors, base, self.gain, self.noise, drift)
        return base

    def __str__(self) -> str:
        # What its cost depends on, the arguments apart: the key of a profile, and its name in a generated source.
        fills = "+".join(f"{f.kernel}{f.constants}{f.size}{f.stride}" for f in self.fills)
        return f"invert {fills} into {self.size}{self.stride}{self.dtype}"

    @property
    def source_name(self) -> str:
        """The function's name in generated source."""
        return "invert_" + "_".join(dict.fromkeys(fill.kernel for fill in self.fills))


def _scaled_difference(out: Tensor, y: Tensor, b: Tensor, alpha: float) -> None:
    torch.sub(y, b, out=out)
    if alpha != 1:
        out.div_(alpha)


def _divide(out: Tensor, y: Tensor, factor: Tensor | float) -> float | None:
    torch.div(y, factor, out=out)
    if not isinstance(factor, Tensor):
        return None
    sizes = factor.abs().double()
    return _checked(sizes.amin(), sizes.pow(-2).mean().sqrt())


def _multiply(out: Tensor, y: Tensor, factor: Tensor | float) -> float | None:
    torch.mul(y, factor, out=out)
    if not isinstance(factor, Tensor):
        return None
    sizes = factor.abs().double()
    return _checked(1 / sizes.amax(), sizes.square().mean().sqrt())


def _checked(least: Tensor, inverse: Tensor) -> float:
    """What a scale does to errors, ``inverse``.

    Raises:
        ModelError: its least size is too near zero; it was larger when the plan was made.
    """
    size, found = torch.stack((least, inverse)).tolist()
    if not size >= LEAST_SCALE:  # NaN is refused too
        raise ModelError(
            f"a scale by which the plan divides has come near zero ({size:.3g} is below {LEAST_SCALE:g}); plan "
            f"again, or without inverses"
        )
    return float(found)


def _fused(product: Callable[..., Tensor], factor: str) -> Kernel:
    """x of y = beta · x + factor · (a product of tensors)."""

    def kernel(out: Tensor, y: Tensor, a: Tensor, b: Tensor, by: float, beta: float) -> None:
        product(y, a, b, **{factor: -by}, out=out)
        if beta != 1:
            out.div_(beta)

    return kernel


def _lerp_start(out: Tensor, y: Tensor, end: Tensor, weight: Tensor | float) -> float | None:
    grown = _divide(out, y - end, 1 - weight)
    out.add_(end)
    return grown


def _lerp_end(out: Tensor, y: Tensor, start: Tensor, weight: Tensor | float) -> float | None:
    grown = _divide(out, y - start, weight)
    out.add_(start)
    return grown


def _reorder(out: Tensor, y: Tensor, order: Tensor, dim: int) -> None:
    places = order % y.shape[dim]
    if not torch.equal(places.sort().values, torch.arange(len(places), device=places.device)):
        raise ModelError(
            "an order by which the plan puts back what was picked names some place twice; plan again"
        )
    out.index_copy_(dim, places, y)


def _log(out: Tensor, y: Tensor) -> None:
    torch.log(
        y.clamp_min(torch.finfo(y.dtype).tiny), out=out
    )  # what underflowed comes back as the least there is


def _elu(out: Tensor, y: Tensor, alpha: float, scale: float, input_scale: float) -> None:
    # y = scale · x for x > 0, scale · alpha · (exp(input_scale · x) − 1) below; where it has saturated at −1, the
    # largest x that does is taken.
    least = torch.finfo(y.dtype).eps / 2 - 1
    below = torch.log1p((y / (scale * alpha)).clamp(least, 0)) / input_scale
    out.copy_(torch.where(y > 0, y / scale, below))


def _prelu(out: Tensor, y: Tensor, weight: Tensor) -> float | None:
    below = torch.empty_like(out)
    grown = _divide(below, y, weight)
    torch.where(y > 0, y, below, out=out)
    return grown


def _normalised(
    out: Tensor, y: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None
) -> float | None:
    """x of y = (x − mean) · scale · weight + bias, all broadcast over y; in float32 at least."""
    x = y.to(torch.promote_types(y.dtype, torch.float32))
    x = x if bias is None else x - bias
    grown = None
    if weight is not None:
        grown = _divide(scaled := torch.empty_like(x), x, weight)
        x = scaled
    out.copy_(mean + x / scale)
    return None if weight is None or grown is None else grown * float(weight.double().square().mean().sqrt())


def _batch_norm(out: Tensor, y: Tensor, mean: Tensor, scale: Tensor, *affine: Any) -> float | None:
    """``affine``: weight and bias where there are, then which of them are, and the ε of a frozen one (whose
    ``scale`` is the running variance) or None."""
    *tensors, has_weight, has_bias, eps = affine
    shape = (1, -1, *(1,) * (y.dim() - 2))
    given = iter(tensors)
    weight = next(given).view(shape) if has_weight else None
    bias = next(given).view(shape) if has_bias else None
    scale = scale if eps is None else torch.rsqrt(scale + eps)
    return _normalised(out, y, mean.view(shape), scale.view(shape), weight, bias)


def _layer_norm(out: Tensor, y: Tensor, mean: Tensor, scale: Tensor, *affine: Any) -> float | None:
    *tensors, has_weight, has_bias = affine
    given = iter(tensors)
    weight = next(given) if has_weight else None
    bias = next(given) if has_bias else None
    return _normalised(out, y, mean, scale, weight, bias)


def _group_norm(out: Tensor, y: Tensor, mean: Tensor, scale: Tensor, *affine: Any) -> float | None:
    *tensors, has_weight, has_bias = affine
    n, groups = mean.shape
    shape = (n, groups, y.shape[1] // groups, math.prod(y.shape[2:]))
    given = iter(tensors)
    weight = next(given).view(1, groups, -1, 1) if has_weight else None
    bias = next(given).view(1, groups, -1, 1) if has_bias else None
    x = torch.empty(shape, dtype=out.dtype, device=out.device)
    statistics = mean.view(n, groups, 1, 1), scale.view(n, groups, 1, 1)
    grown = _normalised(x, y.reshape(shape), *statistics, weight, bias)
    out.copy_(x.view(y.shape))
    return grown


def _slice(out: Tensor, y: Tensor, ranges: tuple[tuple[int, int, int, int], ...]) -> None:
    for dim, start, end, step in ranges:
        y = torch.ops.aten.slice.Tensor(y, dim, start, end, step)
    out.copy_(y)


KERNELS: Mapping[str, Kernel] = {
    "subtract": lambda out, y, b, alpha: torch.sub(y, b, alpha=alpha, out=out),
    "add": lambda out, y, b, alpha: torch.add(y, b, alpha=alpha, out=out),
    "difference": _scaled_difference,  # (first − second) ÷ alpha
    "shift": lambda out, y, by: torch.add(y, by, out=out),
    "reflect": lambda out, y, c, alpha: torch.sub(y, c, out=out).div_(-alpha),  # x of y = c − alpha · x
    "addcmul": _fused(torch.addcmul, "value"),
    "addcdiv": _fused(torch.addcdiv, "value"),
    "addmm": _fused(torch.addmm, "alpha"),
    "baddbmm": _fused(torch.baddbmm, "alpha"),
    "lerp_start": _lerp_start,
    "lerp_end": _lerp_end,
    "reorder": _reorder,
    "negate": lambda out, y: torch.neg(y, out=out),
    "divide": _divide,
    "quotient": lambda out, y, factor: torch.div(y, factor, out=out),
    "multiply": _multiply,
    "product": lambda out, y, factor: torch.mul(y, factor, out=out),
    "log": _log,
    "exp": lambda out, y: torch.exp(y, out=out),
    "leaky_relu": lambda out, y, slope: out.copy_(functional.leaky_relu(y, 1 / slope)),
    "elu": _elu,
    "prelu": _prelu,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "copy": lambda out, y: out.copy_(y),
    "slice": _slice,
    "select": lambda out, y, dim, index: out.copy_(y.select(dim, index)),
    "roll": lambda out, y, shifts, dims: out.copy_(torch.roll(y, shifts, dims)),
    "flip": lambda out, y, dims: out.copy_(torch.flip(y, dims)),
    "pixel_unshuffle": lambda out, y, factor: out.copy_(functional.pixel_unshuffle(y, factor)),
}
"""By name: ``(out, *tensors, *constants)``."""
