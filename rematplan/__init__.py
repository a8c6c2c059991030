"""rematplan: run a training step within a memory budget, with the least extra time for recomputation."""

from __future__ import annotations

import importlib
from importlib import metadata
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
    from rematplan.auditing.audit import Audit, audit
    from rematplan.auditing.faults import Fault
    from rematplan.compile_backend import backend
    from rematplan.fitting.fit import Fit, fit
    from rematplan.knapsack_solver import KnapsackSolver
    from rematplan.optim.kfac import KFAC
    from rematplan.pipeline.plan_pipeline import plan_pipeline
    from rematplan.pipeline.runnable_pipeline import Pipeline
    from rematplan.plan_any_module import finish_weights, plan_module, plan_stage, planning
    from rematplan.plan_in_place import apply, remove
    from rematplan.planner.auto.auto_strategy import Auto
    from rematplan.planner.core.plan import Plan, save_plan
    from rematplan.planner.core.strategy import Strategy
    from rematplan.planner.strategies.anneal import Anneal
    from rematplan.planner.strategies.approx_dp import ApproxDP
    from rematplan.planner.strategies.chen_greedy import ChenGreedy
    from rematplan.planner.strategies.chen_sqrt import ChenSqrt
    from rematplan.planner.strategies.exact_dp import ExactDP
    from rematplan.planner.strategies.ilp import ILP
    from rematplan.planner.strategies.nested_dp import NestedDP
    from rematplan.planner.strategies.reversible import Reversible
    from rematplan.planner.strategies.store_all import StoreAll
    from rematplan.plans.options import SavedPlan
    from rematplan.runtime.statistics.options import Kronecker

__version__: str

__all__ = [
    "ILP",
    "KFAC",
    "Anneal",
    "ApproxDP",
    "Audit",
    "Auto",
    "ChenGreedy",
    "ChenSqrt",
    "ExactDP",
    "Fault",
    "Fit",
    "InfeasibleBudget",
    "KnapsackSolver",
    "Kronecker",
    "LoadedStep",
    "ModelError",
    "NestedDP",
    "Pipeline",
    "Plan",
    "ProblemError",
    "RematplanError",
    "Reversible",
    "SavedPlan",
    "Sizes",
    "StepReport",
    "StoreAll",
    "Strategy",
    "TrainingGraph",
    "UsageError",
    "apply",
    "audit",
    "backend",
    "curves",
    "finish_weights",
    "fit",
    "load_problem",
    "load_step",
    "no_recompute",
    "plan",
    "plan_module",
    "plan_pipeline",
    "plan_stage",
    "planning",
    "problem",
    "remove",
    "run_step",
    "save_plan",
    "save_problem",
]

# The modules of names that need torch or numba. They take seconds to import, so each is imported at its first use.
_HOMES = {
    "KFAC": "rematplan.optim.kfac",
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
    **dict.fromkeys(("Audit", "audit"), "rematplan.auditing.audit"),
    "Fault": "rematplan.auditing.faults",
    **dict.fromkeys(("Fit", "fit"), "rematplan.fitting.fit"),
    "backend": "rematplan.compile_backend",
    "KnapsackSolver": "rematplan.knapsack_solver",
    "Pipeline": "rematplan.pipeline.runnable_pipeline",
    "plan_module": "rematplan.plan_any_module",
    "plan_stage": "rematplan.plan_any_module",
    "plan_pipeline": "rematplan.pipeline.plan_pipeline",
    "finish_weights": "rematplan.plan_any_module",
    "planning": "rematplan.plan_any_module",
    **dict.fromkeys(("apply", "remove"), "rematplan.plan_in_place"),
    "Kronecker": "rematplan.runtime.statistics.options",
    "Auto": "rematplan.planner.auto.auto_strategy",
    "Anneal": "rematplan.planner.strategies.anneal",
    "ApproxDP": "rematplan.planner.strategies.approx_dp",
    "ChenGreedy": "rematplan.planner.strategies.chen_greedy",
    "ChenSqrt": "rematplan.planner.strategies.chen_sqrt",
    "ExactDP": "rematplan.planner.strategies.exact_dp",
    "NestedDP": "rematplan.planner.strategies.nested_dp",
    "StoreAll": "rematplan.planner.strategies.store_all",
    "ILP": "rematplan.planner.strategies.ilp",
    "Reversible": "rematplan.planner.strategies.reversible",
    "SavedPlan": "rematplan.plans.options",
    "Strategy": "rematplan.planner.core.strategy",
    "Plan": "rematplan.planner.core.plan",
    "save_plan": "rematplan.planner.core.plan",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return metadata.version("rematplan")
        except metadata.PackageNotFoundError:  # a source tree that is not installed
            return "unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'rematplan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
