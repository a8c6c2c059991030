"""Overhead, proven bound, gap and seconds of `auto` at shares f of the activation part, on captured training graphs.

f = (budget − inputs − outputs) ÷ (no-recompute peak − inputs − outputs). Roofline costs of a data-centre GPU. Planning
is timed end to end: block strategies, bound and search.

Usage: python benchmarks/planner_gaps.py [--networks unet resnet50] [--shares .8 .6 .5 .4 .3] [--seconds 15]
       python benchmarks/planner_gaps.py --problems a.json b.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from rematplan.ir import InfeasibleBudget, TrainingGraph, load_problem
from rematplan.planner.bounds import lower_bound
from rematplan.planner.plan import plan_from_runs
from rematplan.planner.strategies.auto import Auto

SIZES = {"unet": (8, None), "resnet50": (96, 224), "resnet152": (48, 224), "vgg19": (64, 224)}
"""Batch and image size: those of Kusumoto et al., where they name them."""


def captured(names: list[str]) -> Iterator[TrainingGraph]:
    from rematplan.api import Sizes, load_step, problem

    for name in names:
        batch, image = SIZES.get(name, (None, None))
        yield problem(load_step(name, sizes=Sizes(batch=batch, image=image)))


def budget_at(graph: TrainingGraph, share: float) -> int:
    peak = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    fixed = graph.input_bytes + sum(graph.size[t] for t in graph.outputs if t not in set(graph.inputs))
    return fixed + int(share * (peak - fixed))


def line(graph: TrainingGraph, share: float, seconds: float) -> str:
    budget = budget_at(graph, share)
    began = time.monotonic()
    try:
        plan = Auto(time_limit=seconds).plan(graph, budget)
    except InfeasibleBudget as error:
        proven = "proven unreachable" if lower_bound(graph, budget, 1).unreachable else "not proven"
        return f"nothing fits ({proven}); smallest peak {error.smallest / budget:.3f} of the budget"
    overhead, bound = 100 * plan.estimate.overhead, 100 * (plan.lower_bound or 0.0)
    took = time.monotonic() - began
    return f"{overhead:>9.4f} {bound:>9.4f} {overhead - bound:>8.4f} {took:>8.1f}  {plan.status} ({plan.strategy})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(SIZES))
    parser.add_argument("--problems", nargs="*", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.6, 0.5, 0.4, 0.3, 0.2])
    parser.add_argument("--seconds", type=float, default=12.0)
    options = parser.parse_args()
    print(f"{'network':>12} {'ops':>6} {'f':>5} {'overhead':>9} {'bound %':>9} {'gap':>8} {'seconds':>8}")
    graphs = map(load_problem, options.problems) if options.problems else captured(options.networks)
    for graph in graphs:
        for share in options.shares:
            found = line(graph, share, options.seconds)
            print(f"{graph.name[:12]:>12} {len(graph.ops):>6} {share:>5} {found}", flush=True)


if __name__ == "__main__":
    main()
