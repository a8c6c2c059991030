"""Checks of the optimizer's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer

from rematplan.ir import UsageError
from rematplan.optim.damped_inverses import INVERSES
from rematplan.optim.factor import AUTO
from rematplan.optim.param_groups import Group

MakeOthers: TypeAlias = Callable[[list[Group]], Optimizer]
"""Makes an optimizer from param groups, for the parameters without factors."""


def check_others(model: nn.Module, theirs: list[Group], others: MakeOthers | None) -> None:
    """Check that parameters without factors have an optimizer.

    Args:
        model: the model, for the names of parameters.
        theirs: the param groups of parameters without factors.
        others: makes the optimizer for ``theirs``, if the user named one.

    Raises:
        UsageError: there are such parameters and no optimizer; the message names the first five.
    """
    if others is not None or not theirs:
        return
    left = {id(p) for group in theirs for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in left]
    raise UsageError(
        f"no factors for {', '.join(names[:5])}{' …' * (len(names) > 5)}: state an optimizer for them, "
        f"such as others=torch.optim.AdamW"
    )


def check_numbers(
    numbers: Mapping[str, float],
    inverse: str,
    intervals: tuple[int, ...],
    decay: float,
    kl_clip: float | None,
) -> None:
    """Check that numeric options are in their ranges and that the kind of inverse is known.

    Args:
        numbers: learning rate, momentum, weight decay and damping, by name.
        inverse: the kind of inverse, a name of `INVERSES` or ``auto``.
        intervals: numbers of steps, each at least 1.
        decay: the decay of the moving averages, from 0 to below 1.
        kl_clip: the bound of the clipping, above 0, or None.

    Raises:
        UsageError: one of them is not; the message names it with its value.
    """
    if inverse != AUTO and inverse not in INVERSES:
        raise UsageError(f"unknown inverse {inverse!r}; known: {AUTO}, {', '.join(INVERSES)}")
    for name, number in numbers.items():
        if not number >= 0:
            raise UsageError(f"{name} is {number}; it must be 0 or more")
    if numbers["damping"] == 0 or (kl_clip is not None and not kl_clip > 0):
        raise UsageError(f"damping is {numbers['damping']} and kl_clip {kl_clip}; both must be above 0")
    if not 0 <= decay < 1 or min(intervals) < 1:
        raise UsageError(
            f"decay is {decay} and intervals are {intervals}; decay must be from 0 to below 1, intervals 1 or more"
        )
