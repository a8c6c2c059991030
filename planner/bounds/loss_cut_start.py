"""A start for the annealer from a minimum cut at the loss, which says what stays resident and which forward
ops run again.

The price of a resident byte is raised until the schedule fits. On chains of blocks the result was within
hundredths of a percent of the lower bound; an op that needs all recomputed early favours block plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import traffic_of
from rematplan.planner.arrays.precedence import Precedence
from rematplan.planner.blocks.evaluate_runs import evaluate_runs
from rematplan.planner.blocks.lowering import kept_always
from rematplan.planner.blocks.lowering_kernel import lowered
from rematplan.planner.bounds.max_flow import CutNetwork
from rematplan.planner.core.array_types import Ints
from rematplan.planner.core.effort import Effort

SLOPE = 0.05
PRICES = 28  # the largest number of prices tried
FIRST_PRICE = 0.05  # unit: base cost / (budget - inputs)
CLOSE = 1.00002  # prices within this factor count as equal


def cut_start(
    graph: TrainingGraph, order: Precedence, cut: int, budget: int, effort: Effort | None = None
) -> list[str] | None:
    """Return the cheapest order of execution (op names) within ``budget`` bytes that minimum cuts at several prices
    find, until ``effort`` is spent; None if none fits. For problems with a backward half and without inverses."""
    network = CutNetwork(graph, order, cut, SLOPE)
    unit = graph.base_cost / max(1, budget - graph.input_bytes)
    low, high, price = 0.0, 0.0, FIRST_PRICE * unit
    best: tuple[float, Ints] | None = None
    for _ in range(PRICES):
        if effort is not None and effort.over:
            break
        found = network.minimum(price)
        if found is None:
            break
        runs = _recomputing(graph, cut, found.again)
        peak, cost = evaluate_runs(graph, runs)
        if peak <= budget:
            high = price
            best = (cost, runs) if best is None or cost < best[0] else best
        else:
            low = price
        if low and high and high < CLOSE * low:
            break
        price = 2 * price if not high else (low * high) ** 0.5 if low else high / 2
    return None if best is None else [graph.ops[o].name for o in best[1]]


def _recomputing(graph: TrainingGraph, cut: int, again: Sequence[int]) -> Ints:
    """Return the positions of the runs that free the results of the ops ``again`` after the forward and recompute them
    when needed. Results that the op ``cut`` reads, or that may be computed only once, stay."""
    traffic = traffic_of(graph)
    kept = np.ones(len(graph.tensors), dtype=np.bool_)
    for o in again:
        kept[traffic.writes[traffic.writes_at[o] : traffic.writes_at[o + 1]]] = False
    # What the cut's op reads, and what may be computed once, stays.
    kept[traffic.reads[traffic.reads_at[cut] : traffic.reads_at[cut + 1]]] = True
    one_block = np.where(traffic.forward, 0, -1)  # the first of two; the results of the last stay resident
    return lowered(traffic, one_block, 2, kept | kept_always(graph))
