"""rematplan: a training step within a memory budget, at the least extra time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rematplan.ir import (
    InfeasibleBudget,
    ModelError,
    ProblemError,
    RematplanError,
    TrainingGraph,
    UsageError,
    load_problem,
    save_problem,
)

if TYPE_CHECKING:
    from rematplan.api import (
        LoadedStep,
        Sizes,
        StepReport,
        curves,
        load_step,
        no_recompute,
        plan,
        problem,
        run_step,
    )
    from rematplan.drop_in import plan_module

__all__ = [
    "InfeasibleBudget",
    "LoadedStep",
    "ModelError",
    "ProblemError",
    "RematplanError",
    "Sizes",
    "StepReport",
    "TrainingGraph",
    "UsageError",
    "curves",
    "load_problem",
    "load_step",
    "no_recompute",
    "plan",
    "plan_module",
    "problem",
    "run_step",
    "save_problem",
]

# Where the names that need torch stand: it takes seconds to import, and a problem file is planned without it.
_HOMES = {
    **dict.fromkeys(
        (
            "LoadedStep",
            "Sizes",
            "StepReport",
            "curves",
            "load_step",
            "no_recompute",
            "plan",
            "problem",
            "run_step",
        ),
        "rematplan.api",
    ),
    "plan_module": "rematplan.drop_in",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rematplan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
