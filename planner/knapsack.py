"""The 0/1 knapsack problem: of items with weights and values, those of the most value within a capacity.

Nemhauser and Ullmann (1969): item by item, the list of all Pareto-optimal (weight, value) pairs of subsets. The items
come in the order of value per weight. So the greedy completion of a pair, with a fraction of the first item that no
longer fits, bounds what the pair can reach (Dantzig, 1957). Pairs that cannot exceed the best subset found so far are
dropped. What is left is small unless weights and values are strongly correlated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_PAIRS = 30_000
"""From longer lists, the pairs with the largest bounds are kept. The result is then optimal only within a gap."""


@dataclass(frozen=True)
class Packing:
    """``items``: the chosen ones, ascending. ``gap``: how far their value is from the optimum at most; 0 if optimal."""

    items: tuple[int, ...]
    gap: float = 0.0


@dataclass(frozen=True)
class _Level:
    """The Pareto-optimal subsets of the first items. ``parent``: the position of each in the list before, without the
    last item; ``taken``: whether it has the last item."""

    weight: NDArray[np.int64]
    value: NDArray[np.float64]
    parent: NDArray[np.int64]
    taken: NDArray[np.bool_]

    def only(self, kept: NDArray[np.bool_] | NDArray[np.int64]) -> _Level:
        return _Level(self.weight[kept], self.value[kept], self.parent[kept], self.taken[kept])

    def with_item(self, weight: int, value: float, capacity: int) -> _Level:
        """Return the Pareto-optimal subsets within ``capacity`` if each may also take an item of ``weight`` and
        ``value``."""
        fits = np.flatnonzero(self.weight + weight <= capacity)
        weights = np.concatenate([self.weight, self.weight[fits] + weight])
        values = np.concatenate([self.value, self.value[fits] + value])
        parent = np.concatenate([np.arange(len(self.weight)), fits])
        taken = np.arange(len(weights)) >= len(self.weight)
        order = np.lexsort((taken, -values, weights))
        best_before = np.maximum.accumulate(values[order])
        kept = order[np.concatenate([[True], values[order][1:] > best_before[:-1]])]
        return _Level(weights[kept], values[kept], parent[kept], taken[kept])


def pack(weights: Sequence[int], values: Sequence[float], capacity: int) -> Packing:
    """Return items whose weights sum to at most ``capacity``, of the most value; within `Packing.gap` of it if pairs
    were dropped (`MOST_PAIRS`).

    Items of no value are left out. Equal arguments have equal results. ``weights``: at least 0, their sum below 2⁶⁰.
    ``values``: at least 0.
    """
    free = [i for i, (w, v) in enumerate(zip(weights, values, strict=True)) if w == 0 and v > 0]
    order = [i for i, (w, v) in enumerate(zip(weights, values, strict=True)) if 0 < w <= capacity and v > 0]
    order.sort(key=lambda i: (-values[i] / weights[i], -weights[i], i))
    chosen, gap = _branch_and_bound([weights[i] for i in order], [values[i] for i in order], capacity)
    return Packing(tuple(sorted([*free, *(order[at] for at in chosen)])), gap)


def _branch_and_bound(
    weights: Sequence[int], values: Sequence[float], capacity: int
) -> tuple[list[int], float]:
    """Return the positions of items of the most value within ``capacity``, and the gap as in `Packing`. The items come
    by falling value per weight, and each fits alone."""
    total_weight = np.concatenate([[0], np.cumsum(np.array(weights, dtype=np.int64))])
    total_value = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
    density = np.append(np.array(values, dtype=np.float64) / np.maximum(weights, 1), 0.0)
    level = _Level(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.bool_))
    # The best subset so far. For example (2, 0, 4): the first pair of the list after two items, and items 2 and 3.
    levels, best, best_at, dropped = [level], -1.0, (0, 0, 0), 0.0
    for done in range(len(weights) + 1):
        if done:
            level = level.with_item(weights[done - 1], values[done - 1], capacity)
        # The items after the first ``done`` that fit one after the other, up to the first that does not.
        room = capacity - level.weight
        end = np.searchsorted(total_weight, room + total_weight[done], side="right") - 1
        greedy = level.value + (total_value[end] - total_value[done])
        bound = greedy + density[end] * (room - (total_weight[end] - total_weight[done]))
        at = int(np.argmax(greedy))
        if greedy[at] > best:
            best, best_at = float(greedy[at]), (done, at, int(end[at]))
        kept = np.flatnonzero(bound > best)
        if len(kept) > MOST_PAIRS:
            ranked = kept[np.argsort(-bound[kept], kind="stable")]
            dropped = max(dropped, float(bound[ranked[MOST_PAIRS]]))
            kept = np.sort(ranked[:MOST_PAIRS])
        if best_at[0] == done:  # the best subset must be found again below
            kept = np.union1d(kept, [best_at[1]])
            best_at = (done, int(np.searchsorted(kept, best_at[1])), best_at[2])
        level = level.only(kept)
        levels.append(level)
        if not len(kept):
            break
    return _items(levels[1:], best_at), max(0.0, dropped - best)


def _items(levels: Sequence[_Level], best_at: tuple[int, int, int]) -> list[int]:
    """Return the items of ``best_at``, which is (done, at, end): subset ``at`` of the first ``done`` items, with the
    items ``done`` to ``end`` - 1."""
    done, at, end = best_at
    found = list(range(done, end))
    while done:
        level = levels[done]
        if level.taken[at]:
            found.append(done - 1)
        at, done = int(level.parent[at]), done - 1
    return found
