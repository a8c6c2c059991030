"""The cost of the cheapest schedule, by trying all schedules."""

from __future__ import annotations

import heapq
import math

from rematplan.ir import TrainingGraph


def cheapest(graph: TrainingGraph, budget: int) -> float:
    """The least cost of any schedule within the budget, infinite if none fits: Dijkstra's algorithm, by single runs and
    frees, over what is resident and which of the ops that write nothing have run."""
    inputs = set(graph.inputs)
    size = {t.name: t.bytes for t in graph.tensors if t.name not in inputs}
    size |= {op.name: 0 for op in graph.ops if not op.writes}
    bit = {name: 1 << at for at, name in enumerate(size)}
    recipes = [
        (sum(bit.get(t, 0) for t in op.reads), sum(bit[t] for t in op.writes or (op.name,)), op)
        for op in (*graph.ops, *graph.inverses)
        if inputs.isdisjoint(op.writes)
    ]
    goal = sum(bit.get(t, 0) for t in (*graph.outputs, *(op.name for op in graph.ops if not op.writes)))

    def held(mask: int) -> int:
        return graph.input_bytes + sum(size[name] for name, b in bit.items() if mask & b)

    best, queue = {0: 0.0}, [(0.0, 0)] if held(0) <= budget else []
    while queue:
        cost, mask = heapq.heappop(queue)
        if cost > best[mask]:
            continue
        if mask & goal == goal:
            return cost
        moves = [(cost, mask & ~b) for b in bit.values() if mask & b]
        moves += [
            (cost + op.cost, mask | writes)
            for reads, writes, op in recipes
            if mask & reads == reads and held(mask | writes) + op.workspace <= budget
        ]
        for total, then in moves:
            if total < best.get(then, math.inf):
                best[then] = total
                heapq.heappush(queue, (total, then))
    return math.inf
