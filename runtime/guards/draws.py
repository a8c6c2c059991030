"""Draws of random numbers in a traced forward whose results are known before the step runs.

They follow from the generator's state: a guard makes the same draws, and restores the state. Draws into unknown
tensors, such as dropout, are repeated too, because they advance the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rematplan.runtime.graph.compat import pytree

ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Blank:
    """A reference to a tensor of unknown values in the arguments of a repeated draw. ``at``: its number."""

    at: int


ADVANCING = frozenset(
    {
        *(
            ATEN.native_dropout,
            ATEN.bernoulli,
            ATEN.bernoulli_,
            ATEN.rand_like,
            ATEN.randn_like,
            ATEN.randint_like,
        ),
        *(ATEN.uniform_, ATEN.normal_, ATEN.random_, ATEN.exponential_, ATEN.geometric_, ATEN.log_normal_),
        *(ATEN.cauchy_, ATEN.normal, ATEN.multinomial),
    }
)
"""Ops that draw the same number of random numbers whatever the values of their arguments are."""


def repeated(
    op: Callable[..., Any],
    sizes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    types: Sequence[tuple[torch.dtype, torch.device]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Make a draw again, on tensors of ones, so that the generator advances. ``args``, ``kwargs``: the arguments of
    ``op``, with a `Blank` in place of each tensor. ``sizes``, ``strides``, ``types``: of these tensors."""
    tensors = [
        torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(1)
        for size, stride, (dtype, device) in zip(sizes, strides, types, strict=True)
    ]
    args, kwargs = pytree.tree_map_only(Blank, lambda blank: tensors[blank.at], (args, kwargs))
    op(*args, **kwargs)


def arguments_of_repeated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of `repeated` for a call with traced tensors."""
    tensors: list[torch.Tensor] = []

    def blank(tensor: torch.Tensor) -> Blank:
        tensors.append(tensor)
        return Blank(len(tensors) - 1)

    args, kwargs = pytree.tree_map_only(torch.Tensor, blank, (args, kwargs))
    return (
        op,
        [list(t.shape) for t in tensors],
        [list(t.stride()) for t in tensors],
        [(t.dtype, t.device) for t in tensors],
        args,
        kwargs,
    )


def own_generator(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws from a generator among its arguments, not from the global one."""
    given = (g for g in pytree.tree_leaves((args, kwargs)) if isinstance(g, torch.Generator))
    return any(g is not torch.default_generator for g in given)
