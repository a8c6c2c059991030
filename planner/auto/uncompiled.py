"""Chen's plans by plain Python, for a training that begins before the hot loops are compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import without_inverses
from rematplan.planner.blocks.forward_graph import forward_graph
from rematplan.planner.blocks.lowering import lower_to_positions, partition_of
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.strategy import silent
from rematplan.planner.strategies.block_strategy import BlockStrategy
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt

STRATEGIES: tuple[BlockStrategy, ...] = (ChenSqrt(), ChenGreedy())


def uncompiled_plan(graph: TrainingGraph, budget: int, seconds: float) -> Plan | None:
    """Return the cheapest plan of `ChenSqrt` and `ChenGreedy` within ``budget`` bytes.

    It needs no compiled loop. After ``seconds`` it returns the best plan found by then, or the first that it finds
    later. None if no plan fits, or if the problem has no phases.
    """
    if not graph.has_phases:
        return None
    best, until = None, time.monotonic() + seconds
    for plan in _plans(graph):
        if plan.peak <= budget and (best is None or plan.estimate.cost < best.estimate.cost):
            best = plan
        if best is not None and time.monotonic() > until:
            break
    return best


def _plans(graph: TrainingGraph) -> Iterator[Plan]:
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
