"""Exhaustive search over all schedules of a tiny problem: the optimum, or nothing where the problem is not
tiny.

Dijkstra's algorithm over sets of resident tensors; the steps are «run a recipe» at its cost and «free a
tensor» at none. Any order, any number of runs, inverses too. Up to 2^tensors states, so the number of states
is capped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rematplan.ir import TrainingGraph

MOST_STATES = 4000
MOST_TENSORS = 64
"""Beyond which there are more states than may be met, and each takes long to look at."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """``cost``: the least cost of any schedule within the budget, inf if there is none. ``runs``: such a
    schedule's."""

    cost: float
    runs: tuple[str, ...]


def exhaustive(graph: TrainingGraph, budget: int, most_states: int = MOST_STATES) -> Optimum | None:
    """The optimum within ``budget`` bytes (``ordered`` is not looked at), or None if there are too many tensors or
    states, or some op may never run again (what has run is no part of a state)."""
    if graph.never_rerun:
        return None
    inputs = set(graph.inputs)
    names = [t.name for t in graph.tensors if t.name not in inputs]
    # An op that writes nothing is there for what it does, and must run: it leaves a mark, of no bytes, that is wanted.
    silent = [o for o in graph.ops if not o.writes]
    if len(names) + len(silent) > MOST_TENSORS:
        return None
    bit = {t: 1 << i for i, t in enumerate(names)}
    mark = {o.name: 1 << i for i, o in enumerate(silent, len(names))}
    size = [graph.size[t] for t in names]
    recipes = [
        (
            o.name,
            sum(bit.get(t, 0) for t in o.reads),
            sum(bit[t] for t in o.writes) or mark.get(o.name, 0),
            o.cost,
            o.workspace,
        )
        for o in (*graph.ops, *graph.inverses)
        if all(t in bit for t in o.writes)  # an inverse that writes an input may never run
    ]
    goal = sum(bit.get(t, 0) for t in graph.outputs) + sum(mark.values())
    if graph.input_bytes > budget:
        return Optimum(float("inf"), ())
    best: dict[int, float] = {0: 0.0}
    came: dict[int, tuple[int, str | None]] = {}
    held = {0: graph.input_bytes}
    queue = [(0.0, 0)]
    while queue:
        cost, mask = heapq.heappop(queue)
        if cost > best[mask]:
            continue
        if mask & goal == goal:
            return Optimum(cost, _path(came, mask))
        if len(best) > most_states:
            return None
        steps: list[tuple[float, int, str | None]] = [
            (cost, mask & ~(1 << i), None) for i in range(len(names)) if mask >> i & 1
        ]
        for name, reads, writes, price, workspace in recipes:
            if mask & reads == reads:
                fresh = writes & ~mask
                after = held[mask] + sum(size[i] for i in range(len(names)) if fresh >> i & 1)
                if after + workspace <= budget:
                    steps.append((cost + price, mask | writes, name))
        for total, then, ran in steps:
            if total < best.get(then, float("inf")):
                best[then], came[then] = total, (mask, ran)
                held[then] = graph.input_bytes + sum(size[i] for i in range(len(names)) if then >> i & 1)
                heapq.heappush(queue, (total, then))
    return Optimum(float("inf"), ())


def _path(came: dict[int, tuple[int, str | None]], mask: int) -> tuple[str, ...]:
    runs: list[str] = []
    while mask in came:
        mask, name = came[mask]
        if name is not None:
            runs.append(name)
    return tuple(reversed(runs))
