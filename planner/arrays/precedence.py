"""Which ops every plan runs, which ops must run before which, and the bytes that each op needs while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.caches.graph_cache import cached_on


@dataclass(frozen=True)
class Precedence:
    """Which ops must run before which in any valid schedule of a problem.

    ``recipes``: the problem's ops, then its inverses (which compute a tensor from tensors that were computed from it).
    All numbers below are positions in this tuple. ``makers``: for each name of a tensor that is not an input, the ops
    and inverses that write it. ``before[v]``: a bit mask of v and everything that must run before v. ``needed``: a bit
    mask of the ops that must run before the outputs exist.
    """

    recipes: tuple[Op, ...]
    makers: dict[str, tuple[int, ...]]
    before: tuple[int, ...]
    needed: int


def precedence(graph: TrainingGraph) -> Precedence:
    """Compute which ops must run before which in any valid schedule of a problem, inverses included.

    Everything that must run before v, and v itself, is the greatest solution of before(v) = {v} ∪ ⋃_{t read by v} ⋂_{u
    writes t} before(u). Without inverses, each tensor has one writer, and one pass in the problem's order suffices:
    before(v) is v and its ancestors. With inverses, these are the equations of dominators, and are iterated from the
    set of all ops downwards. O(passes · reads · n / 64).
    """
    recipes = graph.recipes
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
    """Return, for each op, the bytes of everything that must be resident while it runs, except the inputs of the
    problem: the tensors that it reads and writes, and its workspace."""
    inputs = set(graph.inputs)

    def sizes() -> tuple[int, ...]:
        return tuple(
            op.workspace + sum(graph.size[t] for t in {*op.reads, *op.writes} - inputs) for op in graph.ops
        )

    return cached_on(graph, "working sets", sizes)


def needed_ops(graph: TrainingGraph) -> list[Op]:
    """Return the ops that every plan runs if no inverses are used, in the problem's order.

    These are the ops that an output depends on, that draw random numbers, or that write nothing (they run for their
    side effects), and all ops that these three kinds depend on.
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
    """Return the problem without its inverses (the further ops that compute a tensor from tensors that were computed
    from it). Each call for one graph object returns the same object: the graph itself if it has no inverses."""
    if not graph.inverses:
        return graph
    return cached_on(graph, "without inverses", lambda: replace(graph, inverses=()))


def must_run(graph: TrainingGraph) -> set[str]:
    """Return the names of the ops that every plan runs, even if it uses inverses: the ops that draw random numbers,
    those that write nothing, and those without which an output cannot be computed."""
    needed = precedence(graph).needed
    ordered = set(graph.ordered)
    return {
        op.name for i, op in enumerate(graph.ops) if needed >> i & 1 or not op.writes or op.name in ordered
    }
