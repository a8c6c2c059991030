"""Replacements for ops in which eager mode chooses between two formulas by values, which a tracer has not.

The other formula has other last bits. A replacement chooses inside a single traced op, each time that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rematplan.runtime.graph.compat import AutoDispatchBelowAutograd, DispatchKey, OpOverload

ATEN = torch.ops.aten
COMPOSITE = DispatchKey.CompositeImplicitAutograd
NONE, MEAN = 0, 1
"""ATen's codes for two reductions of a loss."""


@torch.library.custom_op("rematplan::prod_backward", mutates_args=())
def _prod_backward(
    gradient: torch.Tensor, x: torch.Tensor, product: torch.Tensor, dim: int | None
) -> torch.Tensor:
    """Return the gradient of a product with respect to ``x``, by eager mode's formula for its number of zeros. ``dim``:
    along which the product was taken, kept with size 1; None for all elements."""
    zeros, result = int((x == 0).sum()), torch.empty_like(x)
    if not zeros:
        return result.copy_(gradient * (product / x).conj())
    if dim is None:
        return (
            result.copy_(gradient * _but_one(x.flatten(), 0).view(x.shape)) if zeros == 1 else result.zero_()
        )
    return result.copy_(gradient * _but_one(x, dim))


_prod_backward.register_fake(lambda gradient, x, product, dim: torch.empty_like(x))


def _but_one(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor of the shape of ``x``: for each element, the conjugate of the product of all other elements along
    the dimension ``dim``."""
    one, n = torch.ones_like(x.narrow(dim, 0, 1)), x.shape[dim]
    before = torch.cat([one, x.narrow(dim, 0, n - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, n - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return (before * after).conj()


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        with AutoDispatchBelowAutograd():
            product: torch.Tensor = ATEN.prod.default(x) if dim is None else ATEN.prod.dim_int(x, dim, True)
        ctx.dim = dim
        ctx.save_for_backward(x, product)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.rematplan.prod_backward(gradient, *ctx.saved_tensors, ctx.dim), None


def _prod(
    x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    product = _Prod.apply(x if dtype is None else x.to(dtype), dim if x.dim() else None)
    return product if keepdim or product.dim() == 0 else product.squeeze(dim)


@torch.library.custom_op("rematplan::masked_sum", mutates_args=())
def _masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum, a scalar, of the elements that ``mask`` selects, added as in eager mode, with the same bits."""
    return x.masked_select(mask).sum()


_masked_sum.register_fake(lambda x, mask: x.new_empty(()))


class _MaskedFill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        with AutoDispatchBelowAutograd():
            filled: torch.Tensor = ATEN.masked_fill.Tensor(x, mask, value)
        return filled

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            gradient.masked_fill(mask, 0) if wanted[0] else None,
            None,
            torch.ops.rematplan.masked_sum(gradient, mask) if wanted[2] else None,
        )


@torch.library.custom_op("rematplan::weight_of_targets", mutates_args=())
def _weight_of_targets(weight: torch.Tensor, target: torch.Tensor, ignored: int) -> torch.Tensor:
    """Return the sum, over all targets that are not equal to ``ignored``, of the weight of the target's class."""
    return weight.gather(0, target.masked_select(target != ignored)).sum()


_weight_of_targets.register_fake(lambda weight, target, ignored: weight.new_empty(()))


def _cross_entropy_of(op: OpOverload) -> Callable[..., Any]:
    """Return a cross entropy by the formula that eager mode chooses for a weighted mean with smoothing; ``op`` computes
    other cases."""

    def cross_entropy(
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = MEAN,
        ignored: int = -100,
        smoothing: float = 0.0,
    ) -> Any:
        classes = min(x.dim() - 1, 1)
        if weight is None or not smoothing or reduction != MEAN or target.is_floating_point():
            return op._op_dk(COMPOSITE, x, target, weight, reduction, ignored, smoothing)
        logs = x.log_softmax(classes)
        loss = ATEN.nll_loss_nd.default(logs, target, weight, reduction, ignored)
        weights = weight.view([-1 if d == classes else 1 for d in range(x.dim())])
        smooth = (-(logs * weights).sum(classes)).masked_fill(target == ignored, 0)
        mean = smooth.sum() / torch.ops.rematplan.weight_of_targets(weight, target, ignored)
        return (1 - smoothing) * loss + mean * (smoothing / x.shape[classes])

    return cross_entropy


BY_VALUES: Mapping[tuple[OpOverload, DispatchKey], Callable[..., Any]] = {
    (ATEN.prod.default, DispatchKey.Autograd): _prod,
    (ATEN.prod.dim_int, DispatchKey.Autograd): _prod,
    (ATEN.masked_fill.Tensor, DispatchKey.Autograd): _MaskedFill.apply,
    (ATEN.cross_entropy_loss.default, COMPOSITE): _cross_entropy_of(ATEN.cross_entropy_loss.default),
}
"""By op and dispatch key, the kernels that replace PyTorch's while a step is traced."""
