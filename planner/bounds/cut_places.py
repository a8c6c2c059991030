"""Choose candidate ops for cuts: a chain of ops that must precede one another, and its ops with the most
prominent memory.

Op u *must precede* v if each valid schedule that runs v has run u before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import Precedence, working_sets
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.schedule import Run, with_frees
from rematplan.planner.core.simulator import resident_bytes

LEVELS = 50
"""Bytes are compared in steps of about 1/50 of the largest, so that small tensors next to large ones do not count as
peaks."""


def heaviest_chain(graph: TrainingGraph, order: Precedence) -> list[tuple[int, int]]:
    """Return the chain of ops, each of which must precede the next, with the most resident bytes in sum, as
    pairs (position, bytes).

    It ends with an op that must run; empty if there is none. Bytes are those without recomputation.
    """
    resident = _base_heights(graph)
    inputs = set(graph.inputs)
    total, previous = [0] * len(graph.ops), [-1] * len(graph.ops)
    for i, op in enumerate(graph.ops):
        # What the op reads and nothing else writes. A longest path, linear in the number of reads.
        sources = [order.makers[t][0] for t in op.reads if t not in inputs and len(order.makers[t]) == 1]
        best = max(sources, key=lambda u: total[u], default=-1)
        total[i] = resident[i] + (total[best] if best >= 0 else 0)
        previous[i] = best
    needed = [i for i in range(len(graph.ops)) if order.needed >> i & 1]
    chain = []
    at = max(needed, key=lambda i: total[i], default=-1)
    while at >= 0:
        chain.append((at, resident[at]))
        at = previous[at]
    return chain[::-1]


def needed_line(graph: TrainingGraph, order: Precedence) -> list[tuple[int, int]]:
    """Return the ops that every schedule must run, in order, as pairs (position, resident bytes without
    recomputation).
    """
    return [(i, resident) for i, resident in enumerate(_base_heights(graph)) if order.needed >> i & 1]


def _base_heights(graph: TrainingGraph) -> list[int]:
    """Return the bytes resident while each op runs, workspace included, in the order without recomputation. The
    result is cached on the graph."""

    def heights() -> list[int]:
        schedule = with_frees(graph, [op.name for op in graph.ops])
        series = resident_bytes(graph, schedule)
        return [b for b, step in zip(series, schedule, strict=True) if isinstance(step, Run)]

    return cached_on(graph, "base heights", heights)


def in_line(order: Precedence, cuts: Sequence[int]) -> list[int]:
    """Return the positions of the ops that must run, and must precede or follow each of ``cuts`` or be one of
    them; ascending.
    """
    return [
        v
        for v, before in enumerate(order.before)
        if order.needed >> v & 1 and all(before >> b & 1 or order.before[b] >> v & 1 for b in cuts)
    ]


def cut_candidates(graph: TrainingGraph, line: Sequence[tuple[int, int]], most: int) -> list[int]:
    """Return positions of at most ``most`` ops of ``line`` to cut at: the one with the most bytes, then by
    `prominence`, none next to another. Ops before both the one with the most bytes and the first backward op are left
    out. Empty if ``line`` is."""
    if not line:
        return []
    peak = max(range(len(line)), key=lambda k: line[k][1])
    boundary = next((k for k, (i, _) in enumerate(line) if graph.ops[i].phase == "backward"), 0)
    # Ops before both the op with the most bytes and the backward are not considered.
    first = min(peak, boundary)
    ops = [i for i, _ in line[first:]]
    resident = [bytes_ for _, bytes_ in line[first:]]
    sets = working_sets(graph)
    own = [sets[i] for i in ops]
    ranks = [
        sorted((k for k in range(len(ops)) if prominent[k] > 0), key=lambda k: (-prominent[k], -k))
        for prominent in (prominence(own, resident), prominence(resident, own))
    ]
    # The op with the most resident bytes, then the most prominent ones, no two of them adjacent. Of equally
    # prominent ops the later comes first.
    picked = [peak - first]
    for k in (k for pair in zip_longest(*ranks) for k in pair if k is not None):
        if len(picked) < most and all(abs(k - other) > 1 for other in picked):
            picked.append(k)
    return [ops[k] for k in picked]


def prominence(height: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return how far one must descend from each entry to reach a higher one, in steps of 1/`LEVELS` of the
    largest; for the highest, its height.

    ``second`` decides between equal heights, then the earlier entry counts as higher.
    """
    unit = 1 + max(height) // LEVELS
    height = [h // unit for h in height]
    keys = [(h, s, -k) for k, (h, s) in enumerate(zip(height, second, strict=True))]
    sides = (_saddles(height, keys), _saddles(height[::-1], keys[::-1])[::-1])
    return [h - max(left, right) for h, left, right in zip(height, *sides, strict=True)]


def _saddles(height: Sequence[int], keys: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return, for each entry, the lowest height between it and the nearest higher entry to its left by
    ``keys``; 0 if there is none.
    """
    saddles: list[int] = []
    open_: list[tuple[int, int]] = []  # higher entry, lowest height since the higher one before
    for k, h in enumerate(height):
        low = h
        while open_ and keys[open_[-1][0]] < keys[k]:
            low = min(low, open_.pop()[1])
        saddles.append(low if open_ else 0)
        open_.append((k, low))
    return saddles
