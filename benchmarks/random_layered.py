"""Random layered graphs after appendix A of «Neural Topological Ordering for Computation Graphs» (arXiv:2207.05899),
which MOCCASIN and FastSA plan.

The names of the published graphs state a width ratio, a variability of the layers' widths of 0.75, an edge density of
0.2 and a density of skip connections of 0.14. All else was derived from the published graph of 100 nodes.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

from rematplan.ir import Op, Tensor, TrainingGraph

VARIABILITY = 0.75
"""A layer's width differs from the mean by at most this share of it."""
SKIPS = 0.14
"""Share of the edges that pass over a layer or more."""
REACH = 0.15
"""How far across its layer an edge over several layers strays, as a share of the width."""
SIZE = 2600
"""Bytes: an output's size is the absolute value of a normal number of this deviation."""
DURATION = 1000
"""Durations are uniform below it."""

PUBLISHED = {100: (236, 0.27), 250: (944, 0.43), 500: (2461, 0.36), 1000: (5875, 0.31)}
"""By number of ops, source and sink included: edges, and mean width of a layer ÷ number of layers."""


def random_layered(ops: int, edges: int, ratio: float, seed: int = 0) -> TrainingGraph:
    """Return a random layered graph of ``ops`` ops (one source and one sink included) and ``edges`` reads.

    Between source and sink are layers with a mean of √(ops · ``ratio``) ops. An op reads ops of the previous layer that
    are at about its own position in the layer. Every op reads something and is read. Some edges lead further than the
    next layer. The ops are in a random depth-first order.
    """
    rng = random.Random(seed)
    layers = _layers(ops, ratio, rng)
    found: set[tuple[int, int]] = set()
    pairs: list[tuple[float, int, int]] = []
    for above, below in pairwise(layers):
        near = _by_distance(above, below, rng)
        found |= {min((d, u, v) for d, u, v in near if u == node)[1:] for node in above}
        found |= {min((d, u, v) for d, u, v in near if v == node)[1:] for node in below}
        pairs += near
    skips = round(SKIPS * edges)
    for _, u, v in sorted(pairs):
        if len(found) >= edges - skips:
            break
        found.add((u, v))
    _skip(layers, edges, found, rng)
    return _graph(ops, found, rng)


def _layers(ops: int, ratio: float, rng: random.Random) -> list[list[int]]:
    """Return ops by layer, of random widths: op 0 alone in the first, op ``ops`` − 1 alone in the last."""
    layers, at, mean = [[0]], 1, math.sqrt(ops * ratio)
    while at < ops - 1:
        width = min(ops - 1 - at, max(1, round(mean * rng.uniform(1 - VARIABILITY, 1 + VARIABILITY))))
        layers.append(list(range(at, at + width)))
        at += width
    return [*layers, [ops - 1]]


def _by_distance(above: list[int], below: list[int], rng: random.Random) -> list[tuple[float, int, int]]:
    """Return all pairs of ops in two layers, each with the distance of their positions, with some noise."""
    places = [{node: (i + 0.5) / len(layer) for i, node in enumerate(layer)} for layer in (above, below)]
    return [(abs(places[0][u] - places[1][v]) * rng.uniform(0.5, 1.0), u, v) for u in above for v in below]


def _skip(layers: list[list[int]], edges: int, found: set[tuple[int, int]], rng: random.Random) -> None:
    """Add random edges that skip at least one layer, to ops at about the same position, until there are ``edges``
    edges."""
    while len(found) < edges:
        start = rng.choices(range(1, len(layers) - 3), [len(layer) for layer in layers[1:-3]])[0]
        above, below = layers[start], layers[rng.randrange(start + 2, len(layers) - 1)]
        at = rng.randrange(len(above))
        place = (at + 0.5) / len(above) + rng.uniform(-REACH, REACH)
        found.add((above[at], below[min(len(below) - 1, max(0, int(place * len(below))))]))


def _graph(ops: int, edges: set[tuple[int, int]], rng: random.Random) -> TrainingGraph:
    reads: list[list[int]] = [[] for _ in range(ops)]
    for u, v in sorted(edges):
        reads[v].append(u)
    return TrainingGraph(
        name=f"layered_{ops}",
        tensors=tuple(Tensor(f"t{v}", 1 + round(abs(rng.gauss(0, SIZE)))) for v in range(ops)),
        inputs=(),
        outputs=(f"t{ops - 1}",),
        ops=tuple(
            Op(f"op{v}", tuple(f"t{u}" for u in reads[v]), (f"t{v}",), float(rng.randrange(DURATION)))
            for v in _depth_first(reads, rng)
        ),
    )


def _depth_first(reads: list[list[int]], rng: random.Random) -> list[int]:
    """Return a topological order in which an op that has become ready comes next; ties are broken at random."""
    readers: list[list[int]] = [[] for _ in reads]
    for v, row in enumerate(reads):
        for u in row:
            readers[u].append(v)
    missing, ready, order = [len(row) for row in reads], [0], list[int]()
    while ready:
        order.append(ready.pop())
        fresh = []
        for v in readers[order[-1]]:
            missing[v] -= 1
            if not missing[v]:
                fresh.append(v)
        rng.shuffle(fresh)
        ready += fresh
    return order
