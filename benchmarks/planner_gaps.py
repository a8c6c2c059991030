"""Measure overhead, lower bound and gap of `auto` at shares f of the activations, each with its goal; the smallest
budget; and a comparison with per-block checkpointing, Chen's strategies and both dynamic programs.

f = (budget − inputs − outputs) ÷ (no-recompute peak − inputs − outputs). Planning is timed by the wall clock,
including block strategies, bound and search; the loops are compiled before.

usage: python benchmarks/planner_gaps.py [--only NAME ...] [--shares .8 .6 .5 .4 .3] [--no-rivals]
       python benchmarks/planner_gaps.py --problems a.json b.json
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from networks import NETWORKS, activation_share, rivals, share_of
from one_step import cpu_seconds

from rematplan.ir import InfeasibleBudget, TrainingGraph, load_problem
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.bounds.bound_search import lower_bound
from rematplan.planner.core.plan import CLOSED, Plan
from rematplan.planner.peak_report import floor_text

GOALS: dict[str, dict[float, float]] = {
    "gpt12": dict.fromkeys((0.8, 0.6, 0.5, 0.4, 0.3), 0.1),
    "gpt24": dict.fromkeys((0.8, 0.6, 0.5, 0.4, 0.3), 0.1),
    "resnet50": {0.8: 0.2, 0.6: 0.2, 0.5: 0.2, 0.4: 0.2, 0.3: 0.7},
    "vgg19": {0.8: 0.2, 0.6: 0.2, 0.5: 0.2, 0.4: 0.2, 0.3: 0.7},
    "googlenet": {0.8: 0.2, 0.6: 0.2, 0.5: 0.2, 0.4: 0.2, 0.3: 0.7},
    "unet": {0.8: 0.2, 0.6: 0.2, 0.5: 0.2, 0.4: 0.6},
    "resnet152": dict.fromkeys((0.8, 0.6, 0.5, 0.4), 0.4),
    "densenet161": dict.fromkeys((0.8, 0.6, 0.5, 0.4), 0.4),
    "10k ops": dict.fromkeys((0.5, 0.3), 0.1),
}
"""The goal for the gap, in points, by network and f; cells without an entry have no goal."""

SECONDS = 15.0
LARGE, LARGE_SECONDS = 5000, 60.0
"""Ops from which on a plan may take longer."""
EARLY = 1.0  # seconds kept back from the search, for what comes after it
CLOSER = (
    0.98  # of a rival's peak: planned within it, at less overhead, both its peak and its overhead are beaten
)


def planned(graph: TrainingGraph, budget: int, seconds: float) -> Plan | InfeasibleBudget:
    """Return `auto`'s plan within ``budget`` bytes, or the error if it finds none."""
    try:
        return Auto(time_limit=seconds, reuse=False).plan(graph, budget)
    except InfeasibleBudget as error:
        return error


def cell(graph: TrainingGraph, share: float, goal: float | None, seconds: float) -> str:
    """Plan a graph at a share of its activations, and return a line of the table.

    ``goal``: the largest gap (overhead − lower bound, in percentage points) that counts as reached; None if there is no
    goal. ``seconds``: of planning.
    """
    graph = replace(graph)  # so that nothing is known of it from the cell before
    budget = activation_share(graph, share)
    began, worked = time.monotonic(), cpu_seconds()
    plan = planned(graph, budget, seconds - EARLY)
    took = f"{time.monotonic() - began:>6.1f} s {cpu_seconds() - worked:>6.1f} s CPU  load {os.getloadavg()[0]:.1f}"
    start = f"{graph.name[:12]:>12} {len(graph.ops):>6} {share:>4}"
    if isinstance(plan, InfeasibleBudget):
        proven = "proven unreachable" if lower_bound(graph, budget, 1).unreachable else "nothing found"
        return f"{start} {proven}; least found f = {share_of(graph, plan.smallest):.3f} {took}"
    overhead, bound = 100 * plan.estimate.overhead, 100 * (plan.lower_bound or 0.0)
    verdict = "open" if goal is None else f"≤ {goal:<4} {'yes' if overhead - bound <= goal else 'NO'}"
    figures = f"{overhead:>9.4f} {bound:>9.4f} {overhead - bound:>8.4f}"
    return f"{start} {figures}  {verdict:>10} {took}  {plan.status}, {plan.strategy}"


def least(graph: TrainingGraph, others: Sequence[Plan], seconds: float) -> Plan:
    """Search the plan of the smallest peak; print it next to the smallest peak of ``others``, and return it."""
    plan = cheapest_near_smallest_peak(graph, seconds, starts=others)
    rival = min((p.estimate.peak for p in others), default=0)
    print(
        f"  least budget: f = {share_of(graph, plan.estimate.peak):.4f}, overhead "
        f"{100 * plan.estimate.overhead:.1f} %; the rivals' least f = {share_of(graph, rival):.4f}; "
        f"no plan below {floor_text(graph)}",
        flush=True,
    )
    return plan


def compare(graph: TrainingGraph, name: str, curve: Sequence[Plan], seconds: float) -> None:
    """Compare two plans of another method with `auto`'s at their peaks, and print a line for each.

    They are its plan of the smallest peak and the one in the middle of its ``curve``. `auto` is tried first with a
    smaller budget than their peak. ``name``: the method's name.
    """
    for plan in dict.fromkeys((curve[-1], curve[len(curve) // 2])):
        peak, overhead = plan.estimate.peak, plan.estimate.overhead
        if overhead == 0:
            continue
        line = f"  {name:>12}: f = {share_of(graph, peak):.3f}, overhead {100 * overhead:7.3f} %; ours "
        for share in (CLOSER, 1.0):
            ours = planned(graph, int(share * peak), seconds)
            if not isinstance(ours, InfeasibleBudget) and ours.estimate.overhead < overhead - CLOSED:
                break
        if isinstance(ours, InfeasibleBudget):
            print(f"{line} nothing  DOES NOT DOMINATE", flush=True)
            continue
        found = f"{100 * ours.estimate.overhead:7.3f} % at {ours.estimate.peak / peak:.4f} of its peak"
        equal = "equals it, proven optimal" if ours.status == "optimal" else "DOES NOT DOMINATE"
        verdict = "dominates" if ours.estimate.overhead < overhead - CLOSED else equal
        print(f"{line}{found}  {verdict}", flush=True)


def network(name: str, shares: Sequence[float], seconds: float, with_rivals: bool) -> None:
    """Print the lines of one network at all shares, and the comparisons with other methods if ``with_rivals``."""
    chosen = NETWORKS[name]
    loaded, graph = chosen.load()
    seconds = max(seconds, LARGE_SECONDS) if len(graph.ops) > LARGE else seconds
    goals = GOALS.get(name, {})
    for share in (s for s in shares if not goals or len(graph.ops) <= LARGE or s in goals):
        print(cell(graph, share, goals.get(share), seconds), flush=True)
    if with_rivals and len(graph.ops) <= LARGE:
        others = list(rivals(chosen, loaded, graph))
        least(graph, [curve[-1] for _, curve in others], seconds)
        for rival, curve in others:
            compare(graph, rival, curve, seconds / 2)


def main() -> None:
    """Print the table for all chosen networks or problem files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(GOALS), metavar="NAME")
    parser.add_argument("--problems", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.6, 0.5, 0.4, 0.3, 0.2])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--no-rivals", action="store_true")
    options = parser.parse_args()
    compile_kernels()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'network':>12} {'ops':>6} {'f':>4} {'overhead':>9} {'bound %':>9} {'gap':>8}  {'goal':>10}")
    if options.problems:
        for graph in map(load_problem, options.problems):
            for share in options.shares:
                print(cell(graph, share, None, options.seconds), flush=True)
    else:
        for name in options.only:
            network(name, options.shares, options.seconds, not options.no_rivals)


if __name__ == "__main__":
    main()
