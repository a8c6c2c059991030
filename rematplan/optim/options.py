"""The options of the optimizer `KFAC`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from torch import nn
from torch.optim import Optimizer

from rematplan.ir import UsageError
from rematplan.optim.damped_inverses import INVERSES
from rematplan.optim.factor import AUTO
from rematplan.optim.param_groups import Group

MakeOthers: TypeAlias = Callable[[list[Group]], Optimizer]
"""A function that makes an optimizer from param groups, for the parameters without factors."""


def check_others(model: nn.Module, theirs: list[Group], others: MakeOthers | None) -> None:
    """Raise a UsageError if there are parameters without Kronecker factors (``theirs``) and no optimizer for them."""
    if others is not None or not theirs:
        return
    left = {id(p) for group in theirs for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in left]
    raise UsageError(
        f"no factors for {', '.join(names[:5])}{' …' * (len(names) > 5)}: state an optimizer for them, "
        f"such as others=torch.optim.AdamW"
    )


class OptionNames(TypedDict, total=False):
    """The options of `KFAC` that are passed on to `Options`, as a type for optional keyword arguments."""

    kl_clip: float | None
    decay: float
    inverse: str
    factors_every: int
    inverse_every: int
    early_steps: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `KFAC` that all param groups share; UsageError if one is out of its range. `KFAC` says
    what they mean."""

    kl_clip: float | None = 1e-3
    decay: float = 0.95
    inverse: str = AUTO
    factors_every: int = 1
    inverse_every: int = 10
    early_steps: int = 20

    def __post_init__(self) -> None:
        """Raise `UsageError` if an option is unknown or out of its range."""
        if self.inverse != AUTO and self.inverse not in INVERSES:
            raise UsageError(f"unknown inverse {self.inverse!r}; known: {AUTO}, {', '.join(INVERSES)}")
        if self.kl_clip is not None and not self.kl_clip > 0:
            raise UsageError(f"kl_clip is {self.kl_clip}; it must be above 0, or None")
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay is {self.decay}; it must be from 0 to below 1")
        for name in ("factors_every", "inverse_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it is a number of steps, 1 or more")
        if self.early_steps < 0:
            raise UsageError(f"early_steps is {self.early_steps}; it is a number of steps, 0 or more")


def check_settings(settings: Mapping[str, float]) -> None:
    """Raise a UsageError if a param group's learning rate, momentum or weight decay is below 0, or its
    damping not above 0."""
    for name, number in settings.items():
        if not number >= 0:
            raise UsageError(f"{name} is {number}; it must be 0 or more")
    if settings["damping"] == 0:
        raise UsageError(f"damping is {settings['damping']}; it must be above 0")
