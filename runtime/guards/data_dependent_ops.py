"""Variants of ATen ops whose shapes depend on values. They take the shapes, so that a tracer can run them."""

from __future__ import annotations

from typing import Any

import torch

from rematplan.runtime.graph.compat import OpOverload, disable_current_modes, pytree

ATEN = torch.ops.aten


def sizes_of(result: Any) -> list[int]:
    """Return the shapes of an op's tensor results as one flat list: all sizes of the first, then those of the next."""
    return [size for tensor in pytree.tree_leaves(result) for size in tensor.shape]


def _with_sizes(op: OpOverload) -> Any:
    """Define a variant of an op that has one more keyword argument, ``sizes``: the shapes of its results, as `sizes_of`
    returns them. Return the variant."""
    name = f"rematplan::{op._opname}"
    arguments, results = str(op._schema).split("(", 1)[1].split(") -> ")
    torch.library.define(name, f"({arguments}, *, int[] sizes) -> {results}")

    @torch.library.impl(name, "CompositeExplicitAutograd")
    def kernel(*args: Any, sizes: list[int], **kwargs: Any) -> Any:
        del sizes
        return op(*args, **kwargs)

    def fake(*args: Any, sizes: list[int], **kwargs: Any) -> Any:
        # A run on one-element zeros shows the number of dimensions and the types.
        with disable_current_modes():
            small = op(*pytree.tree_map_only(torch.Tensor, _single_zero, args), **kwargs)
        left = iter(sizes)
        return pytree.tree_map(
            lambda t: torch.empty([next(left) for _ in t.shape], dtype=t.dtype, device=t.device), small
        )

    torch.library.register_fake(name, fake)
    return getattr(torch.ops.rematplan, op._opname).default


def _single_zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros([1] * tensor.ndim, dtype=tensor.dtype, device=tensor.device)


WITH_SIZES = {
    op: _with_sizes(op)
    for op in (
        ATEN._unique2.default,
        ATEN.bincount.default,
        ATEN.unique_consecutive.default,
        ATEN.unique_dim.default,
    )
}
"""By op, its variant that takes the shapes of its results as the keyword argument ``sizes``."""


@torch.library.custom_op("rematplan::ctc_loss", mutates_args=())
def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    longest: int,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `aten::_ctc_loss`: losses (batch,) and log probabilities (batch, steps, 2 · ``longest`` + 1).
    ``longest``: the greatest of ``target_lengths``."""
    del longest
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    return results


@_ctc_loss.register_fake
def _(
    log_probs: torch.Tensor,
    _targets: Any,
    _input_lengths: Any,
    _target_lengths: Any,
    longest: int,
    *_options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, 2 * longest + 1))


CTC_LOSS = torch.ops.rematplan.ctc_loss.default
