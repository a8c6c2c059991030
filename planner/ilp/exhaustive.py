"""Exhaustive search over all schedules of a tiny problem: the optimum, or nothing where the problem is not
tiny.

A* over sets of resident tensors; a step frees what stands in a recipe's way and runs it, at its cost. Any order, any
number of runs, inverses too. What is resident does no harm until a run needs the room, so that no step frees more than
it must: of the sets of tensors that make room enough those are tried of which none can be spared. What nothing reads
and nobody wants is not kept. The floor of what is still to be paid is the cost of the ops that have to run for what is
missing. Up to 2^tensors states all the same, so their number is capped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rematplan.ir import Op, TrainingGraph

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
    bits = len(graph.tensors) - len(graph.inputs) + sum(not op.writes for op in graph.ops)
    if graph.never_rerun or bits > MOST_TENSORS:
        return None
    masks = _Masks(graph)
    if graph.input_bytes > budget:
        return Optimum(math.inf, ())
    best: dict[int, float] = {0: 0.0}
    came: dict[int, tuple[int, str]] = {}
    queue = [(0.0, 0.0, 0)]
    while queue:
        _, cost, mask = heapq.heappop(queue)
        if cost > best[mask]:
            continue
        if mask & masks.goal == masks.goal:
            return Optimum(cost, _path(came, mask))
        held = graph.input_bytes + masks.bytes(mask)
        for op, reads, writes in masks.recipes:
            if mask & reads != reads or not writes & masks.useful & ~mask:
                continue
            total, during = cost + op.cost, mask | writes
            short = held + masks.bytes(writes & ~mask) + op.workspace - budget
            others = [row for row in masks.sizes if mask & row[0] and not (reads | writes) & row[0]]
            for freed in _freed(others, short):
                if len(best) > most_states:
                    return None
                then = during & masks.useful & ~freed
                if total < best.get(then, math.inf):
                    best[then], came[then] = total, (mask, op.name)
                    heapq.heappush(queue, (total + masks.floor(then), total, then))
    return Optimum(math.inf, ())


class _Masks:
    """A problem in bit masks of its tensors. An op that writes nothing is there for what it does, and must run: it
    leaves a mark, of no bytes, that is wanted.

    ``recipes``: what may run, what it reads and what it writes. ``sizes``: bit and bytes of each tensor that has any,
    the largest first. ``goal``: what is wanted at the end; ``useful``: that and what is read.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        inputs = set(graph.inputs)
        names = [t.name for t in graph.tensors if t.name not in inputs]
        silent = [op.name for op in graph.ops if not op.writes]
        bit = {t: 1 << i for i, t in enumerate(names)}
        mark = {name: 1 << i for i, name in enumerate(silent, len(names))}
        self.sizes = sorted(
            ((bit[t], graph.size[t]) for t in names if graph.size[t]), key=lambda row: -row[1]
        )
        self.recipes: list[tuple[Op, int, int]] = [
            (op, sum(bit.get(t, 0) for t in op.reads), sum(bit[t] for t in op.writes) or mark.get(op.name, 0))
            for op in (*graph.ops, *graph.inverses)
            if inputs.isdisjoint(op.writes)  # an inverse that writes an input may never run
        ]
        self.goal = sum(bit.get(t, 0) for t in graph.outputs) + sum(mark.values())
        self.useful = self.goal
        for _, reads, _ in self.recipes:
            self.useful |= reads
        several = {t for inverse in graph.inverses for t in inverse.writes}
        self._only = [
            (op.cost, reads, writes & ~sum(bit[t] for t in op.writes if t in several))
            for op, reads, writes in reversed(self.recipes[: len(graph.ops)])
        ]

    def bytes(self, mask: int) -> int:
        """Of a set of tensors."""
        return sum(size for bit, size in self.sizes if mask & bit)

    def floor(self, mask: int) -> float:
        """What must still be paid where this is resident: for each op that alone makes what is missing of the goal,
        and of what such ops read."""
        cost, missing = 0.0, self.goal & ~mask
        for price, reads, makes in self._only:
            if makes & missing:
                cost += price
                missing |= reads & ~mask
        return cost


def _freed(held: Sequence[tuple[int, int]], short: int) -> Iterator[int]:
    """The sets of some of these tensors, given as bit and bytes, the largest first, that have so many bytes together
    and would not without any one of them."""
    if short <= 0:
        yield 0
        return
    left = sum(size for _, size in held)
    for at, (bit, size) in enumerate(held):
        if left < short:
            return
        left -= size
        for others in _freed(held[at + 1 :], short - size):
            yield bit | others


def _path(came: dict[int, tuple[int, str]], mask: int) -> tuple[str, ...]:
    runs: list[str] = []
    while mask in came:
        mask, name = came[mask]
        runs.append(name)
    return tuple(reversed(runs))
