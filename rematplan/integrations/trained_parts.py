"""Plan in place the part of a model that a trainer's budget bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.plan_any_module import planning
from rematplan.plan_in_place import apply
from rematplan.runtime.graph.compat import OptimizedModule
from rematplan.runtime.graph.warn import warn

OF_THE_MODEL = ("modules", "policy", "dynamic_shapes")
"""The options that may name parts and arguments of the model, so that they cannot be checked without it."""


def part_of(model: nn.Module, module: str | None) -> nn.Module:
    """Return the submodule of a model with this name, the model for None, and in place of a compiled one the module
    that it compiles; `UsageError` if there is none."""
    try:
        found = model.get_submodule(module or "")
    except AttributeError:
        names = [name for name, _ in model.named_children()]
        raise UsageError(
            f"a {type(model).__name__} has no module {module!r}; it has {', '.join(names[:6])}"
        ) from None
    return found._orig_mod if isinstance(found, OptimizedModule) else found


class TrainerBudget:
    """What all trainers' callbacks have in common: the options of a plan, and a warning if the first training step does
    not call the planned part. ``budget``, ``options``: those of `rematplan.apply`. ``module``: the name of the planned
    part; None: each callback has a default."""

    def __init__(self, budget: str | int | None = None, *, module: str | None = None, **options: Any) -> None:
        of_no_model = {key: value for key, value in options.items() if key not in OF_THE_MODEL}
        apply(nn.Module(), budget, **of_no_model)  # refuses what is missing, unknown or malformed
        self.budget, self.module, self.options = budget, module, options
        self.unseen: nn.Module | None = None
        """The planned part until its first step has ended."""

    def warn_if_not_called(self) -> None:
        """Warn if the first training step, which has just ended, did not call the planned part."""
        part, self.unseen = self.unseen, None
        if part is not None and not planning(part).plans:
            warn(
                f"no training step has called this {type(part).__name__}, so nothing is planned and the budget bounds "
                f"nothing; name the module that the step calls"
            )


def plain_optimizers(optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that a trainer's wrappers run."""
    found = []
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", None)
        found.append(inner if isinstance(inner, torch.optim.Optimizer) else optimizer)
    return found
