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

# The names that need torch or numba, by module. These take seconds to import, so each is imported at its first use.
_LATER = {
    "api": "LoadedStep Sizes StepReport curves load_step no_recompute plan problem run_step",
    "auditing.audit": "Audit audit",
    "auditing.faults": "Fault",
    "compile_backend": "backend",
    "fitting.fit": "Fit fit",
    "knapsack_solver": "KnapsackSolver",
    "optim.kfac": "KFAC",
    "pipeline.plan_pipeline": "plan_pipeline",
    "pipeline.runnable_pipeline": "Pipeline",
    "plan_any_module": "finish_weights plan_module plan_stage planning",
    "plan_in_place": "apply remove",
    "planner.auto.auto_strategy": "Auto",
    "planner.core.plan": "Plan save_plan",
    "planner.core.strategy": "Strategy",
    "planner.strategies.anneal": "Anneal",
    "planner.strategies.approx_dp": "ApproxDP",
    "planner.strategies.chen_greedy": "ChenGreedy",
    "planner.strategies.chen_sqrt": "ChenSqrt",
    "planner.strategies.exact_dp": "ExactDP",
    "planner.strategies.ilp": "ILP",
    "planner.strategies.nested_dp": "NestedDP",
    "planner.strategies.reversible": "Reversible",
    "planner.strategies.store_all": "StoreAll",
    "plans.options": "SavedPlan",
    "runtime.statistics.options": "Kronecker",
}
_HOMES = {name: f"rematplan.{module}" for module, names in _LATER.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return metadata.version("rematplan")
        except metadata.PackageNotFoundError:  # a source tree that is not installed
            return "unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'rematplan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
