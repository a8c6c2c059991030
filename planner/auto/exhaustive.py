"""Find the optimal schedule of a tiny problem by A* over sets of resident tensors; give up if it is not tiny.

It covers each order, any repetitions, and inverses. The heuristic is the cost of the ops that must run to
compute the missing outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.auto.exhaustive_kernel import MOST_BITS, Masks, search

MOST_STATES = 20_000
"""By default, so many sets of resident tensors may be kept, which takes about a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The optimal schedule within a budget."""

    cost: float
    """Infinite if no schedule fits."""
    runs: tuple[str, ...]
    """The names of the ops and inverses that it runs, in order; empty if none fits."""


def exhaustive(
    graph: TrainingGraph, budget: int, most_states: int = MOST_STATES, below: float = math.inf
) -> Optimum | None:
    """Return the optimal schedule within ``budget`` bytes; its cost is infinite if none that costs less than ``below``
    fits. None if there are more than `MOST_BITS` tensors or the search keeps more than ``most_states`` states.

    An op that writes nothing, may run once, or has its place in ``graph.ordered`` counts as a tensor.
    """
    if not has_few_tensors(graph):
        return None
    if graph.input_bytes > budget:
        return Optimum(math.inf, ())
    inputs = set(graph.inputs)
    # An inverse that writes an input never runs.
    recipes = [op for op in graph.recipes if inputs.isdisjoint(op.writes)]
    ended, cost, path = search(_masks(graph, recipes), budget - graph.input_bytes, below, most_states)
    return Optimum(cost, tuple(recipes[i].name for i in path)) if ended else None


def has_few_tensors(graph: TrainingGraph) -> bool:
    """Return whether the problem has few enough tensors for `exhaustive`."""
    return len(graph.tensors) - len(graph.inputs) + len(_marked(graph)) <= MOST_BITS


def _marked(graph: TrainingGraph) -> list[str]:
    """Return the ops of which a state says whether they have run: they write nothing, may run once, or have their place
    in an order."""
    named = {*graph.ordered, *graph.never_rerun}
    return [op.name for op in graph.ops if not op.writes or op.name in named]


def _masks(graph: TrainingGraph, recipes: Sequence[Op]) -> Masks:
    """Return the problem as masks: one bit for each tensor that is not an input, and a mark, a bit of 0 bytes, for each
    op of `_marked`. A run of the op sets its mark. ``recipes``: the ops, then the inverses."""
    inputs = set(graph.inputs)
    names = [t.name for t in graph.tensors if t.name not in inputs]
    bit = {t: 1 << i for i, t in enumerate(names)}
    mark = {name: 1 << i for i, name in enumerate(_marked(graph), len(names))}
    later = {name: sum(mark[op] for op in graph.ordered[i + 1 :]) for i, name in enumerate(graph.ordered)}
    silent, once = {op.name for op in graph.ops if not op.writes}, set(graph.never_rerun)
    reads = [reduce(or_, (bit.get(t, 0) for t in op.reads), 0) for op in recipes]  # a read may be named twice
    writes = [sum(bit[t] for t in op.writes) for op in recipes]
    several = sum(bit[t] for t in {t for inverse in recipes[len(graph.ops) :] for t in inverse.writes})
    goal = sum(bit.get(t, 0) for t in graph.outputs) + sum(mark[name] for name in silent.union(graph.ordered))
    sized = sorted(((graph.size[t], bit[t]) for t in names if graph.size[t]), reverse=True)
    return Masks(
        np.array(reads, np.int64),
        np.array([made + mark.get(op.name, 0) for op, made in zip(recipes, writes, strict=True)], np.int64),
        np.array([op.cost for op in recipes], float),
        np.array([op.workspace for op in recipes], np.int64),
        np.array([mark[op.name] if op.name in once else 0 for op in recipes], np.int64),
        np.array([mark.get(op.name, 0) for op in recipes], np.int64),
        np.array([later.get(op.name, 0) for op in recipes], np.int64),
        np.array([bit for _, bit in sized], np.int64),
        np.array([size for size, _ in sized], np.int64),
        np.array([made & ~several for made in reversed(writes[: len(graph.ops)])], np.int64),
        goal,
        goal | sum(mark.values()) | reduce(or_, reads, 0),
    )
