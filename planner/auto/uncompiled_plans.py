"""Plans that are made without numba, for a training that begins before the planner's loops are compiled."""

from __future__ import annotations

from collections.abc import Iterator

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.auto.eviction import plan_by_eviction
from rematplan.planner.blocks.forward_graph import forward_graph
from rematplan.planner.blocks.lowering import lower_to_positions, partition_of
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.strategy import silent
from rematplan.planner.strategies.block_strategy import BlockStrategy
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt

STRATEGIES: tuple[BlockStrategy, ...] = (ChenSqrt(), ChenGreedy())
SIMULATIONS = 24
"""The largest number of simulations of eviction, each with a random policy."""
LONGEST = 4.0
"""If no other plan fits, the simulations of eviction may take until this multiple of the stated seconds. Compiling the
loops takes longer than that."""


def uncompiled_plan(graph: TrainingGraph, budget: int, seconds: float) -> Plan | None:
    """Return the cheapest plan within ``budget`` bytes that `ChenSqrt`, `ChenGreedy` and eviction find
    without compiled loops, or None.

    Eviction may take `LONGEST` times ``seconds`` if nothing else fits.
    """
    effort = Effort(seconds * LONGEST)
    best = _best_of_chen(graph, budget, effort.part(seconds)) if graph.has_phases else None
    left = effort.part(seconds - effort.spent()) if best else effort
    evicted = plan_by_eviction(graph, budget, left, tries=SIMULATIONS, compiled=False)
    found = [plan for plan in (best, evicted) if plan is not None]
    return min(found, key=lambda plan: plan.estimate.cost, default=None)


def _best_of_chen(graph: TrainingGraph, budget: int, effort: Effort) -> Plan | None:
    best: Plan | None = None
    for plan in _chen_plans(graph):
        if plan.peak <= budget and (best is None or plan.estimate.cost < best.estimate.cost):
            best = plan
        if best is not None and effort.over:
            break
    return best


def _chen_plans(graph: TrainingGraph) -> Iterator[Plan]:
    """Yield the plans, a full and a lean one (`partition_of`), of each division into blocks by `STRATEGIES`, lowered
    without compiled loops."""
    bare = without_inverses(graph)
    view = forward_graph(bare)
    seen = set()
    for strategy in STRATEGIES:
        for chain in strategy.chains(view, silent) if len(view) else ():
            if chain not in seen:
                seen.add(chain)
                for lean in (False, True):
                    runs = lower_to_positions(bare, partition_of(bare, chain, lean), compiled=False)
                    yield plan_from_runs(graph, [graph.ops[o].name for o in runs], strategy.name)
