"""Choose candidate ops for cuts: a chain of ops each of which must precede the next, and the ops of it with the most
prominent memory.

A *cut* at an op is the constraint that the bytes resident at the op's first execution fit the budget. An op u *must
precede* v if every valid schedule that runs v has run u before. Sets of ops are bit masks.
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
    """Return the chain of ops with the most resident bytes in sum, as pairs (position in ``graph.ops``, bytes
    resident while the op runs in the order without recomputation).

    Each op of the chain must precede the next, because it writes a tensor that the next one reads and that no other
    op or inverse writes. The chain ends with an op that every schedule runs. Such a chain follows the backbone of the
    network through forward and backward. The result is empty if there is no op that every schedule runs. Longest
    path, linear in the number of reads.
    """
    resident = _base_heights(graph)
    inputs = set(graph.inputs)
    total, previous = [0] * len(graph.ops), [-1] * len(graph.ops)
    for i, op in enumerate(graph.ops):
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
    """Return all ops that every schedule must run, in the problem's order, as pairs (position in ``graph.ops``, bytes
    resident while the op runs in the order without recomputation)."""
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
    """Return the positions in ``graph.ops`` of the ops that every schedule must run and that must precede or follow
    each op of ``cuts``. Ascending; the ops of ``cuts`` are included.

    ``order``: which op must precede which.
    """
    return [
        v
        for v, before in enumerate(order.before)
        if order.needed >> v & 1 and all(before >> b & 1 or order.before[b] >> v & 1 for b in cuts)
    ]


def cut_candidates(graph: TrainingGraph, line: Sequence[tuple[int, int]], most: int) -> list[int]:
    """Return ops to cut at, as positions in ``graph.ops``, the most promising first: at most ``most``, none if
    ``line`` is empty.

    The first op is the one with the most resident bytes. Then follow ops of the backward half where the resident
    bytes, or the op's reads, writes and workspace, stand out from those of the ops before and after. Most such ops
    are where the sizes of the network's tensors change. How far an op stands out is its `prominence`. Of equally
    prominent ops the later comes first; of two adjacent ops only one is returned.

    If the op with the most resident bytes is in the forward half, all ops after it are considered. If there is no
    backward half, all ops are.

    ``line``: the ops to choose from, as pairs (position in ``graph.ops``, resident bytes), such as `heaviest_chain`
    returns.
    """
    if not line:
        return []
    peak = max(range(len(line)), key=lambda k: line[k][1])
    boundary = next((k for k, (i, _) in enumerate(line) if graph.ops[i].phase == "backward"), 0)
    first = min(peak, boundary)
    ops = [i for i, _ in line[first:]]
    resident = [bytes_ for _, bytes_ in line[first:]]
    sets = working_sets(graph)
    own = [sets[i] for i in ops]
    ranks = [
        sorted((k for k in range(len(ops)) if prominent[k] > 0), key=lambda k: (-prominent[k], -k))
        for prominent in (prominence(own, resident), prominence(resident, own))
    ]
    picked = [peak - first]
    for k in (k for pair in zip_longest(*ranks) for k in pair if k is not None):
        if len(picked) < most and all(abs(k - other) > 1 for other in picked):
            picked.append(k)
    return [ops[k] for k in picked]


def prominence(height: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the prominence of each entry of ``height``, as for mountains: how far one must at least descend from it
    to reach a higher entry. For the highest entry, it is its height.

    Heights are rounded down to steps of about 1/`LEVELS` of the largest, and the result counts these steps. ``second``:
    decides which of two entries of equal height counts as higher: the one with the larger value in ``second``, or the
    earlier entry if these values are equal, too.
    """
    unit = 1 + max(height) // LEVELS
    height = [h // unit for h in height]
    keys = [(h, s, -k) for k, (h, s) in enumerate(zip(height, second, strict=True))]
    sides = (_saddles(height, keys), _saddles(height[::-1], keys[::-1])[::-1])
    return [h - max(left, right) for h, left, right in zip(height, *sides, strict=True)]


def _saddles(height: Sequence[int], keys: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return, for each entry, the lowest height between it and the nearest higher entry to its left; 0 if there is no
    higher entry to the left.

    ``keys``: decides which of two entries is higher.
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
