"""Which ops every plan runs, which ops must run before which, and the bytes that each op needs while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.caches.graph_cache import cached_on


@dataclass(frozen=True)
class Precedence:
    """Which ops must run before which in any valid schedule, by position in ``recipes``."""

    recipes: tuple[Op, ...]
    """The problem's ops, then its inverses."""
    makers: dict[str, tuple[int, ...]]
    """By name of each tensor that is no input, the ops and inverses that write it."""
    before: tuple[int, ...]
    """``before[v]``: the bit mask of v and all that must run before it."""
    needed: int
    """The bit mask of what must run before the outputs exist."""


def precedence(graph: TrainingGraph) -> Precedence:
    """Compute which ops must run before which in any valid schedule, inverses included. O(passes · reads · n
    / 64).
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
        """Return the bit mask of what must run before all of ``tensors`` exist, by ``before`` so far."""
        mask = 0
        for t in tensors:
            if t not in inputs:
                common = everything
                for u in makers[t]:
                    common &= before[u]
                mask |= common
        return mask

    # The greatest solution of before(v) = {v} ∪ ⋃_{t read by v} ⋂_{u writes t} before(u), the equations of
    # dominators. Without inverses each tensor has one writer, and one pass suffices.
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
    """Return, for each op, the bytes of what it reads and writes, each tensor once, and of its workspace. Inputs of the
    problem do not count."""
    inputs = set(graph.inputs)

    def sizes() -> tuple[int, ...]:
        return tuple(
            op.workspace + sum(graph.size[t] for t in {*op.reads, *op.writes} - inputs) for op in graph.ops
        )

    return cached_on(graph, "working sets", sizes)


def needed_ops(graph: TrainingGraph) -> list[Op]:
    """Return, in order, the ops that every plan without inverses runs: those that write an output or nothing (side
    effects), or are in ``graph.ordered`` (random draws). Ops that these depend on are included."""
    ordered = set(graph.ordered)
    wanted = set(graph.outputs)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if not op.writes or op.name in ordered or not wanted.isdisjoint(op.writes):
            kept.append(op)
            wanted.update(op.reads)
    return kept[::-1]


def without_inverses(graph: TrainingGraph) -> TrainingGraph:
    """Return the problem without its inverses; ``graph`` itself if it has none, else one object per graph object."""
    if not graph.inverses:
        return graph
    return cached_on(graph, "without inverses", lambda: replace(graph, inverses=()))


def must_run(graph: TrainingGraph) -> set[str]:
    """Return the names of the ops that every plan runs, also with inverses. These are the ops without which an output
    cannot exist, that write nothing (side effects), or that are in ``graph.ordered`` (random draws)."""
    needed = precedence(graph).needed
    ordered = set(graph.ordered)
    return {
        op.name for i, op in enumerate(graph.ops) if needed >> i & 1 or not op.writes or op.name in ordered
    }
