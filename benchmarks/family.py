"""Measure how close plans of other sizes come to a new search, in points of overhead above a new search of `auto`.

Compared are the cheapest plan of the family that fits, the best one after tidying, and the best one after four short
anneals. A network is captured at several lengths. The family starts with a curve at the largest one. Then each length
is planned at fixed budgets in bytes, which are shares of the largest length's activations: by choosing from the
family, by polishing the chosen plans, and by a search. Polished plans join the family before the next length. Costs
come from the roofline model.

usage: python benchmarks/family.py [--only gpt12 bert unet] [--seconds 10] [--shares .5 .35 .25]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rematplan import api
from rematplan.ir import InfeasibleBudget, TrainingGraph, show_bytes
from rematplan.planner.annealing.polish import POLISH, polished
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.core.simulator import simulate
from rematplan.planner.family.amounts_by_position import amounts_of
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import whole_bytes

LENGTHS: Mapping[str, tuple[dict[str, int], str, tuple[int, ...]]] = {
    "gpt12": ({"batch": 4, "width": 256}, "tokens", (512, 384, 256, 200)),
    "bert": ({"batch": 4, "width": 256}, "tokens", (512, 384, 256, 200)),
    "unet": ({"batch": 4, "width": 16}, "image", (256, 224, 160, 128)),
}
"""Fixed sizes, and the one that varies, the largest first."""
CURVE = tuple(0.95 - 0.07 * k for k in range(12))
"""Shares of the largest length's activations at which the family's first plans are made."""
SHORT, LONG = 0.1, 0.4
"""CPU seconds of each of the four anneals."""
COLUMNS = ("chosen", "tidied", "4 × .1 s", "4 × .4 s")


@dataclass(frozen=True)
class Cell:
    """The results at one length and one budget.

    ``length``: of the sequence, or side of the image. ``budget``: bytes. ``fresh``: the overhead of a new search.
    ``over``: for each of `COLUMNS`, the overhead above a new search, in percentage points of the step's time; infinite
    if no plan of the family fits.
    """

    length: int
    budget: int
    fresh: float
    over: tuple[float, ...]


def problem(name: str, length: int) -> TrainingGraph:
    """Return the planning problem of a network at a length. ``name``: a key of `LENGTHS`."""
    fixed, varying, _ = LENGTHS[name]
    sizes = api.Sizes(**{**fixed, varying: length})
    return api.problem(api.load_step(name, sizes=sizes, weightless=True))


def cell(family: PlanFamily, graph: TrainingGraph, length: int, budget: int, seconds: float) -> Cell:
    """Plan one length within one budget: from the family, by polishing, and by a new search. Polished plans join the
    family.

    ``seconds``: of the new search.
    """
    try:
        fresh = Auto(time_limit=seconds, reuse=False).plan(replace(graph), budget).estimate.overhead
    except InfeasibleBudget:
        fresh = math.inf
    starts = family.starts(graph, budget, POLISH.tidied)
    fitting = [p for p in starts if p.estimate.peak <= budget]
    best = [min((p.estimate.overhead for p in fitting), default=math.inf)]
    for spent in (0.0, SHORT, LONG):
        found = list(polished(graph, budget, starts, seconds=spent))
        best.append(min((p.estimate.overhead for p in (*fitting, *found)), default=math.inf))
        for plan in found:
            family.add(graph, plan)
    return Cell(length, budget, fresh, tuple(100 * (overhead - fresh) for overhead in best))


def milliseconds(call: Callable[[], object], times: int = 50) -> float:
    """Return the median time of ``times`` calls, in milliseconds."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        durations.append(time.perf_counter() - began)
    return 1e3 * statistics.median(durations)


def timing(family: PlanFamily, graph: TrainingGraph) -> str:
    """Return, as text, how long it takes to evaluate all plans of the family at once, and to simulate them one by
    one."""
    amounts = amounts_of(graph)
    plans = [family.plan(graph, member) for member in family.members]
    evaluated = milliseconds(lambda: family.evaluate(amounts))
    simulated = milliseconds(lambda: [simulate(graph, p.schedule) for p in plans], 5)
    chosen = milliseconds(lambda: family.best_plan(graph, 2**62))
    return (
        f"{len(family)} members of {len(graph.ops)} ops: {evaluated:.3f} ms ({evaluated / len(family):.4f} a member), "
        f"simulated {simulated:.1f} ms; the best as a plan {chosen:.2f} ms"
    )


def table(name: str, seconds: float, shares: Sequence[float]) -> list[Cell]:
    """Plan a network at all its lengths and at all budgets; print a line for each, and return them."""
    lengths = LENGTHS[name][2]
    largest = problem(name, lengths[0])
    whole, peak = whole_bytes(largest), no_recompute(largest).estimate.peak
    budgets = [int(whole + share * (peak - whole)) for share in shares]
    family = PlanFamily(largest)
    steps = [int(whole + share * (peak - whole)) for share in CURVE]
    for plan in Auto(time_limit=3 * seconds, reuse=False).curve(largest, steps):
        family.add(largest, plan)
    print(f"{name}: {len(largest.ops)} ops; {timing(family, largest)}", flush=True)
    cells = []
    for length in lengths[1:]:
        graph = problem(name, length)
        if graph.structure != largest.structure:
            print(f"  {length}: other ops or storages than at {lengths[0]}")
            continue
        for budget in budgets:
            if no_recompute(graph).estimate.peak <= budget:
                continue
            one = cell(family, graph, length, budget, seconds)
            cells.append(one)
            figures = "  ".join(f"{x:>8.3f}" for x in one.over)
            rows = (
                f"fresh {100 * one.fresh:>7.3f} %  {figures}" if math.isfinite(one.fresh) else "nothing fits"
            )
            print(f"  {length:>5} {show_bytes(budget):>10}  {rows}", flush=True)
    print(f"  at the end: {timing(family, largest)}")
    return cells


def main() -> None:
    """Print the table of each network, and for each column the mean and the worst overhead above a new search."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each fresh search")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.35, 0.25], help="budgets")
    args = parser.parse_args()
    compile_kernels()
    print("points over a fresh search:", ", ".join(COLUMNS))
    for name in args.only:
        cells = [c for c in table(name, args.seconds, args.shares) if math.isfinite(c.fresh)]
        for k, column in enumerate(COLUMNS if cells else ()):
            over = [c.over[k] for c in cells]
            within = sum(x <= 1.0 for x in over)
            print(
                f"  {column:>9}: mean {statistics.mean(over):.3f}, worst {max(over):.3f}, {within} of {len(over)} ≤ 1"
            )


if __name__ == "__main__":
    main()
