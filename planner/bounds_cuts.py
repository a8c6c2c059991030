"""Where the lower bound looks: which ops must precede which, and a chain of ops to cut at.

An op u *must precede* v if every valid schedule that runs v has run u before. Sets of ops are bit masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.schedule import Run, with_frees
from rematplan.planner.simulator import resident_bytes


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


def heaviest_chain(graph: TrainingGraph, order: Precedence) -> list[tuple[int, int]]:
    """A chain of ops, each of which must precede the next, with the bytes that the base order holds while
    each runs.

    It is the path through tensors with a single recipe whose bytes sum highest: it follows the backbone of
    the network, forward and back. Longest path, linear in the reads. Only needed ops are on it.
    """
    schedule = with_frees(graph, [op.name for op in graph.ops])
    series = resident_bytes(graph, schedule)
    held = [b for b, step in zip(series, schedule, strict=True) if isinstance(step, Run)]
    inputs = set(graph.inputs)
    total, previous = [0] * len(graph.ops), [-1] * len(graph.ops)
    for i, op in enumerate(graph.ops):
        sources = [order.makers[t][0] for t in op.reads if t not in inputs and len(order.makers[t]) == 1]
        best = max(sources, key=lambda u: total[u], default=-1)
        total[i] = held[i] + (total[best] if best >= 0 else 0)
        previous[i] = best
    needed = [i for i in range(len(graph.ops)) if order.needed >> i & 1]
    chain = []
    at = max(needed, key=lambda i: total[i], default=-1)
    while at >= 0:
        chain.append((at, held[at]))
        at = previous[at]
    return chain[::-1]


def choose_cuts(
    graph: TrainingGraph, chain: Sequence[tuple[int, int]], budget: int, count: int, share: float
) -> list[int]:
    """Ops of the chain to cut at: the one that holds most in the base order, those with the largest working
    sets, and in each of ``count`` even stretches the one with the largest.

    The stretches cover the first ``share`` of the chain's backward half, where memory is tight (later cuts
    add little); of the part that exceeds the budget where there is no backward half.
    """
    if not chain:
        return []
    start, stop = _tight_part(graph, chain, budget, share)

    def hunger(k: int) -> int:
        return -working_set(graph, chain[k][0])

    picked = {max(range(len(chain)), key=lambda k: chain[k][1])}
    picked.update(sorted(range(start, len(chain)), key=hunger)[: 1 + count // 4])
    for j in range(count):
        low, high = (start + (stop - start) * e // count for e in (j, j + 1))
        picked.update(sorted(range(low, high), key=hunger)[:1])
    return [chain[k][0] for k in sorted(picked)]


def working_set(graph: TrainingGraph, op: int) -> int:
    """Bytes that an op holds while it runs besides the inputs: what it reads and writes, and its workspace."""
    row, inputs = graph.ops[op], set(graph.inputs)
    return row.workspace + sum(graph.size[t] for t in {*row.reads, *row.writes} - inputs)


def _tight_part(
    graph: TrainingGraph, chain: Sequence[tuple[int, int]], budget: int, share: float
) -> tuple[int, int]:
    backward = [k for k, (i, _) in enumerate(chain) if graph.ops[i].phase == "backward"]
    if backward:
        return backward[0], backward[0] + max(1, int(share * (len(chain) - backward[0])))
    over = [k for k, (_, held) in enumerate(chain) if held > budget] or [0]
    return over[0], over[-1] + 1
