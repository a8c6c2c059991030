"""Which ops must run, which must precede which, and the bytes that each needs while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.caches.graph_cache import cached_on


@dataclass(frozen=True)
class Precedence:
    """``recipes``: the ops, then the inverses. ``makers[t]``: the recipes that write a tensor that is no
    input. ``before[v]``: the recipes that must precede v, v itself included, as a bit mask. ``needed``: those
    that every schedule must run."""

    recipes: tuple[Op, ...]
    makers: dict[str, tuple[int, ...]]
    before: tuple[int, ...]
    needed: int


def precedence(graph: TrainingGraph) -> Precedence:
    """The must-precede sets: before(v) = {v} ∪ ⋃_{t read by v} ⋂_{u writes t} before(u), the greatest
    solution.

    Without inverses each tensor has one recipe and one pass in the base order finds the ancestors. With them
    the equations are those of dominators, and are iterated downwards from «everything». O(passes · reads · n
    / 64).
    """
    recipes = (*graph.ops, *graph.inverses)
    makers: dict[str, list[int]] = {}
    for i, op in enumerate(recipes):
        for t in op.writes:
            makers.setdefault(t, []).append(i)
    everything = (1 << len(recipes)) - 1
    before = [everything] * len(recipes)
    inputs = set(graph.inputs)

    def reached(tensors: Sequence[str]) -> int:
        mask = 0
        for t in tensors:
            if t not in inputs:
                common = everything
                for u in makers[t]:
                    common &= before[u]
                mask |= common
        return mask

    changed = True
    while changed:
        changed = False
        for i, op in enumerate(recipes):
            mask = (1 << i) | reached(op.reads)
            changed = changed or (mask != before[i] and bool(graph.inverses))
            before[i] = mask
    return Precedence(
        recipes, {t: tuple(m) for t, m in makers.items()}, tuple(before), reached(graph.outputs)
    )


def working_sets(graph: TrainingGraph) -> tuple[int, ...]:
    """Bytes that each op holds while it runs besides the inputs: what it reads and writes, and its workspace."""
    inputs = set(graph.inputs)

    def sizes() -> tuple[int, ...]:
        return tuple(
            op.workspace + sum(graph.size[t] for t in {*op.reads, *op.writes} - inputs) for op in graph.ops
        )

    return cached_on(graph, "working sets", sizes)


def needed_ops(graph: TrainingGraph) -> list[Op]:
    """The ops that must run, in the base order: those that an output depends on, those that draw random
    numbers, those that write nothing (they are there for what they do), and whatever these depend on.

    Inverses are not looked at: with them some of these may be dispensable.
    """
    ordered = set(graph.ordered)
    wanted = set(graph.outputs)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if not op.writes or op.name in ordered or not wanted.isdisjoint(op.writes):
            kept.append(op)
            wanted.update(op.reads)
    return kept[::-1]


def without_inverses(graph: TrainingGraph) -> TrainingGraph:
    """The same problem without inverses; the same object for the same problem."""
    return cached_on(graph, "without inverses", lambda: replace(graph, inverses=()))


def must_run(graph: TrainingGraph) -> set[str]:
    """The ops that draw random numbers, that write nothing, or that must precede an output."""
    needed = precedence(graph).needed
    ordered = set(graph.ordered)
    return {
        op.name for i, op in enumerate(graph.ops) if needed >> i & 1 or not op.writes or op.name in ordered
    }
