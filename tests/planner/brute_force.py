"""The cost of the cheapest schedule, by trying all schedules."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from types import MappingProxyType

from rematplan.ir import TrainingGraph


def cheapest(graph: TrainingGraph, budget: int, over: Mapping[str, str] = MappingProxyType({})) -> float:
    """The least cost of any schedule within the budget, infinite if none fits: Dijkstra's algorithm, by single runs and
    frees, over what is resident and which of the ops have run that write nothing, may run once or have an order.

    ``over``: by the name of an op, the operand in which its result may be written if the schedule frees it directly
    afterwards.
    """
    inputs = set(graph.inputs)
    size = {t.name: t.bytes for t in graph.tensors if t.name not in inputs}
    marked = [op.name for op in graph.ops if not op.writes or op.name in (*graph.ordered, *graph.never_rerun)]
    size |= dict.fromkeys(marked, 0)
    bit = {name: 1 << at for at, name in enumerate(size)}
    ran = {name: bit[name] for name in marked}
    recipes = [
        (sum(bit.get(t, 0) for t in op.reads), sum(bit[t] for t in op.writes) + ran.get(op.name, 0), op)
        for op in (*graph.ops, *graph.inverses)
        if inputs.isdisjoint(op.writes)
    ]
    silent = [op.name for op in graph.ops if not op.writes or op.name in graph.ordered]
    goal = sum(bit.get(t, 0) for t in (*graph.outputs, *silent))

    def held(mask: int) -> int:
        return graph.input_bytes + sum(size[name] for name, b in bit.items() if mask & b)

    def allowed(name: str, mask: int) -> bool:
        if name in graph.never_rerun and mask & ran[name]:
            return False
        if name not in graph.ordered or mask & ran[name]:
            return True
        later = graph.ordered[graph.ordered.index(name) + 1 :]
        return not any(mask & ran[other] for other in later)

    best, queue = {0: 0.0}, [(0.0, 0)] if held(0) <= budget else []
    while queue:
        cost, mask = heapq.heappop(queue)
        if cost > best[mask]:
            continue
        if mask & goal == goal:
            return cost
        moves = [(cost, mask & ~b) for name, b in bit.items() if mask & b and name not in ran]
        moves += [
            (cost + op.cost, mask | writes)
            for reads, writes, op in recipes
            if mask & reads == reads
            and held(mask | writes) + op.workspace <= budget
            and allowed(op.name, mask)
        ]
        moves += [
            (cost + op.cost, (mask | writes) & ~bit[over[op.name]])
            for reads, writes, op in recipes
            if op.name in over
            and mask & reads == reads
            and held(mask | writes) - size[over[op.name]] + op.workspace <= budget
            and allowed(op.name, mask)
        ]
        for total, then in moves:
            if total < best.get(then, math.inf):
                best[then] = total
                heapq.heappush(queue, (total, then))
    return math.inf
