"""The plan with which training starts before a search: quickly found, and replaced when a better plan is found."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import must_run
from rematplan.planner.auto.compile_kernels import kernels_are_ready
from rematplan.planner.auto.uncompiled_plans import uncompiled_plan
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan, with_bound
from rematplan.planner.strategies.store_all import no_recompute

LOG = logging.getLogger("rematplan")

SECONDS = 2.0
"""Seconds of search for plans by plain Python, after a first one fits."""


def plan_at_once(graph: TrainingGraph, budget: int, store: PlanStore) -> Plan | None:
    """Return a plan within ``budget`` bytes without compiled search; None if none is found. It recomputes nothing if
    that fits, else is the cheapest stored plan of the same ops and tensors. Without one, and only if the planner is not
    compiled yet, plain Python searches (`uncompiled_plan`)."""
    whole = _with_floor(no_recompute(graph), graph)
    found = whole if whole.peak <= budget else store.serving(graph, budget)
    if found is None and not kernels_are_ready():
        found = uncompiled_plan(graph, budget, SECONDS)
        LOG.info(
            "%s: the planner's loops are not compiled on this machine yet, which takes about a minute (run rematplan "
            "info warm in advance to avoid it); %s",
            graph.name,
            "no plan that can be made without them fits the budget, so the first step waits"
            if found is None
            else f"training starts with a plan of {found.strategy} while another process compiles them",
        )
    return None if found is None else replace(found, budget=budget)


def _with_floor(plan: Plan, graph: TrainingGraph) -> Plan:
    """Return the plan with a simple lower bound of its overhead: the cost of running once each op that the outputs
    need."""
    if not graph.base_cost:
        return plan
    needed = must_run(graph)
    floor = math.fsum(op.cost for op in graph.ops if op.name in needed) / graph.base_cost - 1
    return with_bound(plan, min(floor, plan.estimate.overhead))
