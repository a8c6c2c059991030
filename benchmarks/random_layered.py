"""Random layered graphs after appendix A of «Neural Topological Ordering for Computation Graphs» (arXiv:2207.05899),
and what `auto` reaches on them at shares of the given order's peak.

Usage: python benchmarks/random_layered.py [--ops 100 250 500 1000] [--seconds 30] [--shares .9 .8 .7]
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import pairwise

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph
from rematplan.planner.plan import plan_from_runs
from rematplan.planner.strategies.auto import Auto

WIDTH = 0.25  # spread of the layers' widths around √n
SKIPS = 0.1  # share of the edges that pass over a layer or more


def random_layered(ops: int, edges: int, seed: int = 0) -> TrainingGraph:
    """About √n layers of about √n ops each; every op reads the layer before and is read by the one behind.

    Some edges skip layers. Every op writes one tensor; sizes and costs are uniform in 1..100 and independent; the last
    layer's tensors are the outputs. ``edges`` counts reads.
    """
    rng = random.Random(seed)
    layers = _layers(ops, rng)
    reads: list[list[int]] = [[] for _ in range(ops)]
    for above, layer in pairwise(layers):
        for v in layer:
            reads[v].append(rng.choice(above))
        for u in above:
            if not any(u in reads[v] for v in layer):
                reads[rng.choice(layer)].append(u)
    placed, tries = sum(map(len, reads)), 0
    level = {v: k for k, layer in enumerate(layers) for v in layer}
    while placed < edges and tries < 50 * edges:
        tries += 1
        v = rng.randrange(ops)
        if level[v] == 0:
            continue
        back = 1 if rng.random() > SKIPS else rng.randint(1, level[v])
        u = rng.choice(layers[level[v] - back])
        if u not in reads[v]:
            reads[v].append(u)
            placed += 1
    return _graph(reads, rng)


def _layers(ops: int, rng: random.Random) -> list[list[int]]:
    layers, at, mean = [], 0, ops**0.5
    while at < ops:
        width = min(ops - at, max(1, round(rng.gauss(mean, WIDTH * mean))))
        layers.append(list(range(at, at + width)))
        at += width
    return layers


def _graph(reads: list[list[int]], rng: random.Random) -> TrainingGraph:
    used = {u for row in reads for u in row}
    return TrainingGraph(
        name=f"layered_{len(reads)}",
        tensors=tuple(Tensor(f"t{v}", rng.randint(1, 100)) for v in range(len(reads))),
        inputs=(),
        outputs=tuple(f"t{v}" for v in range(len(reads)) if v not in used),
        ops=tuple(
            Op(f"op{v}", tuple(f"t{u}" for u in row), (f"t{v}",), float(rng.randint(1, 100)))
            for v, row in enumerate(reads)
        ),
    )


EDGES = {100: 236, 250: 944, 500: 2461, 1000: 5875}
"""The sizes that MOCCASIN and FastSA publish."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, nargs="+", default=list(EDGES))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.8, 0.7])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-order", action="store_true")
    options = parser.parse_args()
    print(f"{'n':>5} {'m':>6} {'share':>6} {'overhead %':>11} {'bound %':>9} {'seconds':>8}")
    for n in options.ops:
        graph = random_layered(n, EDGES.get(n, round(n * (2.4 + 0.0035 * n))), options.seed)
        peak = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
        edges = sum(len(op.reads) for op in graph.ops)
        for share in options.shares:
            began = time.monotonic()
            try:
                plan = Auto(time_limit=options.seconds, keep_order=options.keep_order).plan(
                    graph, int(share * peak)
                )
                found = f"{100 * plan.estimate.overhead:>11.3f} {100 * (plan.lower_bound or 0.0):>9.3f}"
            except InfeasibleBudget as error:
                found = f"  least share {error.smallest / peak:.3f}"
            print(f"{n:>5} {edges:>6} {share:>6} {found} {time.monotonic() - began:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
