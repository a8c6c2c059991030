"""A start for the annealer from the loss cut: what to hold at the turn and what to run again, all at once.

The minimum cut of `bounds_flow` at a price for a held byte says which forward ops run again. The backward half in the
base order, each op with what it needs run again just before it, is a schedule; the price rises until it fits the
budget. On chains of blocks (a transformer, say) it is within hundredths of a percent of the bound; where one demand
brings everything back early it needs a high price, and block plans or annealing do better.

Complexity: a few dozen maximum flows and lowerings; three seconds for ten thousand ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds_cuts import Precedence
from rematplan.planner.bounds_flow import CutNetwork
from rematplan.planner.indexed import indexed
from rematplan.planner.lowering import Partition, lower_to_positions
from rematplan.planner.run_price import price_runs

SLOPE = 0.05
PRICES = 28  # most prices tried
FIRST_PRICE = 0.05  # of the base cost for all the room that the budget leaves
CLOSE = 1.00002  # prices this near to each other are not told apart


def cut_start(graph: TrainingGraph, order: Precedence, cut: int, budget: int) -> list[str] | None:
    """The cheapest run sequence of this kind found within the budget, or None.

    For problems with a backward half and without inverses. ``cut``: a needed op, at the turn or soon after.
    """
    network = CutNetwork(graph, order, cut, SLOPE)
    unit = graph.base_cost / max(1, budget - graph.input_bytes)
    low, high, price = 0.0, 0.0, FIRST_PRICE * unit
    best: tuple[float, list[int]] | None = None
    for _ in range(PRICES):
        found = network.minimum(price)
        if found is None:
            break
        runs = _lower(graph, cut, found.again)
        peak, cost = price_runs(graph, runs)
        if peak <= budget:
            high = price
            best = min(best or (cost, runs), (cost, runs), key=lambda row: row[0])
        else:
            low = price
        if low and high and high < CLOSE * low:
            break
        price = 2 * price if not high else (low * high) ** 0.5 if low else high / 2
    return None if best is None else [graph.ops[o].name for o in best[1]]


def _lower(graph: TrainingGraph, cut: int, again: Sequence[int]) -> list[int]:
    """The schedule that drops at the turn what the ops ``again`` have written."""
    ix = indexed(graph)
    kept = set(graph.ops[cut].reads)
    dropped = {t for o in again if ix.forward[o] for t in graph.ops[o].writes if t not in kept}
    forward = tuple(o for o, is_forward in enumerate(ix.forward) if is_forward)
    names = tuple(ix.ops[o] for o in forward)
    stays = tuple(t for o in forward for t in graph.ops[o].writes if t not in dropped)
    return lower_to_positions(graph, Partition((names, ()), stays))
