"""The ops of inverses, which allocate a storage and recompute it, in pieces, from what was computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from rematplan.ir import ModelError
from rematplan.runtime.graph.tracked_sizes import SizeValues, at_sizes
from rematplan.runtime.inversion.error_tracking import passed_on

LEAST_SCALE = 1e-3
"""The smallest factor that is inverted. Dividing by a smaller one would return mostly rounding errors."""

Kernel: TypeAlias = Callable[..., object]
"""A function ``(out, *tensors, *constants)`` that writes its result into ``out``. A kernel that divides by a
scale that training may change returns the root mean square factor by which it increases errors."""


@dataclass(frozen=True, slots=True)
class Fill:
    """One piece of an inverse: a kernel of `KERNELS` that writes one view of the storage."""

    kernel: str
    """The kernel's name."""
    constants: tuple[Any, ...]
    """The kernel's arguments that are not tensors."""
    arity: int
    """The number of tensors that the kernel reads."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """With ``size`` and ``stride``: the view, in elements."""
    scale: float = 0.0
    """The factor by which dividing by a scale increased errors at planning time; 0 without a scale. If the kernel
    returns the present factor, the two are compared."""


@dataclass(frozen=True, slots=True)
class Inverse:
    """An op that recomputes a storage, and returns a tensor like the result of the call that allocated it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    """With ``size`` and ``stride``: of the tensor that is returned."""
    fills: tuple[Fill, ...]
    """The pieces that together write it."""
    gain: float
    """The factor by which the inverse multiplies a relative error of its arguments."""
    noise: float
    """The relative error that its rounding adds; 0 if numbers are only copied, moved or negated."""

    @property
    def exact(self) -> bool:
        """Whether the inverse recomputes the original bits, provided that its arguments have their original bits."""
        return self.noise == 0.0

    def at_sizes(self, sizes: SizeValues) -> Inverse:
        """Return the same inverse for other sizes: the values of the step's expressions."""
        fills = tuple(
            replace(fill, size=at_sizes(fill.size, sizes), stride=at_sizes(fill.stride, sizes))
            for fill in self.fills
        )
        return replace(
            self, size=at_sizes(self.size, sizes), stride=at_sizes(self.stride, sizes), fills=fills
        )

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Allocate and recompute the storage, and return the tensor in it; `ModelError` if scales changed too much."""
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
        # Everything its cost depends on, except the arguments: its key in a profile.
        fills = "+".join(f"{f.kernel}{f.constants}{f.size}{f.stride}" for f in self.fills)
        return f"invert {fills} into {self.size}{self.stride}{self.dtype}"

    @property
    def source_name(self) -> str:
        """The inverse's function name in generated source."""
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
    """Return ``inverse``, the factor by which dividing by a scale increases errors, as a float; `ModelError` if
    ``least``, the scale's smallest size, is below `LEAST_SCALE`."""
    size, found = torch.stack((least, inverse)).tolist()
    if not size >= LEAST_SCALE:  # also true for NaN
        raise ModelError(
            f"a scale by which the plan divides has come near zero (its smallest absolute value {size:.3g} is below "
            f"{LEAST_SCALE:g}); plan again, or without inverses"
        )
    return float(found)


def _fused(product: Callable[..., Tensor], factor: str) -> Kernel:
    """Return the kernel for x from y = beta · x + factor · p, where p is a product or quotient of two tensors."""

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
            "an index that the plan inverts is no permutation any more: it has an entry twice; plan again"
        )
    out.index_copy_(dim, places, y)


def _log(out: Tensor, y: Tensor) -> None:
    # Values that underflowed to 0 become the smallest normal number.
    torch.log(y.clamp_min(torch.finfo(y.dtype).tiny), out=out)


def _elu(out: Tensor, y: Tensor, alpha: float, scale: float, input_scale: float) -> None:
    # y = scale · x for x > 0, scale · alpha · (exp(input_scale · x) − 1) for x ≤ 0. Where the exponential has
    # saturated at −1, use the largest x for which it does.
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
    """Write to ``out`` the x for which y = (x − mean) · scale · weight + bias. Return the factor on errors if a weight
    is divided by, else None."""
    x = y.to(torch.promote_types(y.dtype, torch.float32))
    x = x if bias is None else x - bias
    grown = None
    if weight is not None:
        scaled = torch.empty_like(x)
        grown = _divide(scaled, x, weight)
        x = scaled
    out.copy_(mean + x / scale)
    return None if weight is None or grown is None else grown * float(weight.double().square().mean().sqrt())


def _weight_and_bias(
    affine: Sequence[Any], shape: tuple[int, ...] | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return a norm's weight and bias, viewed in ``shape`` if given; None for a lacking one. ``affine``: tensors,
    then which exist."""
    *tensors, has_weight, has_bias = affine
    given = iter(tensors if shape is None else [t.view(shape) for t in tensors])
    return next(given) if has_weight else None, next(given) if has_bias else None


def _batch_norm(out: Tensor, y: Tensor, mean: Tensor, scale: Tensor, *given: Any) -> float | None:
    """Undo a batch norm: write its input into ``out``. Return how errors grow, or None."""
    *affine, eps = given
    shape = (1, -1, *(1,) * (y.dim() - 2))
    scale = scale if eps is None else torch.rsqrt(scale + eps)
    return _normalised(out, y, mean.view(shape), scale.view(shape), *_weight_and_bias(affine, shape))


def _layer_norm(out: Tensor, y: Tensor, mean: Tensor, scale: Tensor, *affine: Any) -> float | None:
    return _normalised(out, y, mean, scale, *_weight_and_bias(affine))


def _group_norm(out: Tensor, y: Tensor, mean: Tensor, scale: Tensor, *affine: Any) -> float | None:
    n, groups = mean.shape
    shape = (n, groups, y.shape[1] // groups, math.prod(y.shape[2:]))
    x = torch.empty(shape, dtype=out.dtype, device=out.device)
    statistics = mean.view(n, groups, 1, 1), scale.view(n, groups, 1, 1)
    grown = _normalised(x, y.reshape(shape), *statistics, *_weight_and_bias(affine, (1, groups, -1, 1)))
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
"""Kernels by name."""
