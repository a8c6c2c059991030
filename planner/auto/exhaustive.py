"""Find the optimal schedule of a tiny problem by A* over sets of resident tensors; give up if it is not tiny.

It covers each order, any repetitions, and inverses. The heuristic is the cost of the ops that must run to
compute the missing outputs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rematplan.ir import Op, TrainingGraph

MOST_STATES = 4000
MOST_TENSORS = 64
"""The largest number of tensors, inputs excluded, that `exhaustive` accepts. With more tensors there are more states
than it may visit, and each takes long."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The optimal schedule within a budget."""

    cost: float
    """Infinite if no schedule fits."""
    runs: tuple[str, ...]
    """The names of the ops and inverses that it runs, in order; empty if none fits."""


def exhaustive(graph: TrainingGraph, budget: int, most_states: int = MOST_STATES) -> Optimum | None:
    """Return the optimal schedule within ``budget`` bytes, with an infinite cost if none fits; None if there are more
    than `MOST_TENSORS` tensors or the search reaches more than ``most_states`` states.

    An op that writes nothing, may run once, or has its place in ``graph.ordered`` counts as a tensor.
    """
    masks = _Masks(graph)
    if masks.bits > MOST_TENSORS:
        return None
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
        resident = graph.input_bytes + masks.bytes(mask)
        for op, reads, writes in masks.recipes:
            if mask & reads != reads or not writes & masks.useful & ~mask or masks.forbids(op.name, mask):
                continue
            total, during = cost + op.cost, mask | writes
            short = resident + masks.bytes(writes & ~mask) + op.workspace - budget
            others = [row for row in masks.sizes if mask & row[0] and not (reads | writes) & row[0]]
            # A resident tensor does no harm until an op needs its bytes, so minimal sets are freed, and no
            # earlier.
            for freed in _freed(others, short):
                if len(best) > most_states:
                    return None
                then = during & masks.useful & ~freed
                if total < best.get(then, math.inf):
                    best[then], came[then] = total, (mask, op.name)
                    heapq.heappush(queue, (total + masks.floor(then), total, then))
    return Optimum(math.inf, ())


class _Masks:
    """A problem whose sets of tensors are bit masks: one bit for each tensor that is not an input."""

    def __init__(self, graph: TrainingGraph) -> None:
        inputs = set(graph.inputs)
        names = [t.name for t in graph.tensors if t.name not in inputs]
        # These ops get a further bit of 0 bytes, which they set: it says that they have run. It is part of
        # ``goal`` if the op must run (it writes nothing, or has its place in an order).
        silent = {op.name for op in graph.ops if not op.writes}
        marked = [op.name for op in graph.ops if op.name in silent.union(graph.ordered, graph.never_rerun)]
        bit = {t: 1 << i for i, t in enumerate(names)}
        mark = {name: 1 << i for i, name in enumerate(marked, len(names))}
        self.bits = len(names) + len(marked)
        self.sizes = sorted(
            ((bit[t], graph.size[t]) for t in names if graph.size[t]), key=lambda row: -row[1]
        )
        self.recipes: list[tuple[Op, int, int]] = [
            (op, sum(bit.get(t, 0) for t in op.reads), sum(bit[t] for t in op.writes) + mark.get(op.name, 0))
            for op in graph.recipes
            if inputs.isdisjoint(op.writes)  # an inverse that writes an input may never run
        ]
        self.goal = sum(bit.get(t, 0) for t in graph.outputs) + sum(
            mark[name] for name in silent.union(graph.ordered)
        )
        # Bits that a state keeps: others are not read, and not wanted at the end.
        self.useful = self.goal | sum(mark.values())
        self._again = {name: mark[name] for name in graph.never_rerun}
        self._first = {
            name: (mark[name], sum(mark[later] for later in graph.ordered[i + 1 :]))
            for i, name in enumerate(graph.ordered)
        }
        for _, reads, _ in self.recipes:
            self.useful |= reads
        several = {t for inverse in graph.inverses for t in inverse.writes}
        self._only = [
            (op.cost, reads, writes & ~sum(bit[t] for t in op.writes if t in several))
            for op, reads, writes in reversed(self.recipes[: len(graph.ops)])
        ]

    def forbids(self, name: str, mask: int) -> bool:
        """Return whether an op may not run in a state: it may not run again, or ops that must follow its first run
        have run."""
        own, later = self._first.get(name, (0, 0))
        return bool(mask & self._again.get(name, 0) or (mask & later and not mask & own))

    def bytes(self, mask: int) -> int:
        """Return the total bytes of the set of tensors ``mask``."""
        return sum(size for bit, size in self.sizes if mask & bit)

    def floor(self, mask: int) -> float:
        """Return a lower bound of the cost from a state to the end: the ops that alone can write what is missing."""
        cost, missing = 0.0, self.goal & ~mask
        for price, reads, makes in self._only:
            if makes & missing:
                cost += price
                missing |= reads & ~mask
        return cost


def _freed(resident: Sequence[tuple[int, int]], short: int) -> Iterator[int]:
    """Yield the minimal sets (masks) whose bytes sum to at least ``short``; the empty set if ``short`` ≤ 0.

    ``resident``: pairs (bit, bytes), largest first.
    """
    if short <= 0:
        yield 0
        return
    left = sum(size for _, size in resident)
    for at, (bit, size) in enumerate(resident):
        if left < short:
            return
        left -= size
        for others in _freed(resident[at + 1 :], short - size):
            yield bit | others


def _path(came: dict[int, tuple[int, str]], mask: int) -> tuple[str, ...]:
    runs: list[str] = []
    while mask in came:
        mask, name = came[mask]
        runs.append(name)
    return tuple(reversed(runs))
