"""Search for the least peak of the zoo's networks, and compare it with the peak that no plan can go below.

usage: python benchmarks/least_peaks.py [NAME|FILE ...] [--seconds 15] [--device-model a100]

NAME is a network of the zoo (`rematplan info models`), at its default sizes, on a device model's costs; FILE is a
problem file. Without either, all networks are searched. Each line states the ops, the peak without recomputation, the
smallest found, the proven least, their ratio, and the CPU seconds of the search, which ends early if it gains nothing
more. Then a search for the budget `min` takes as long again; the last columns are its overheads, in percent, at the
smallest peak found and at multiples of it. `least`, `min`, and refusals of other budgets use these searches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rematplan.api import load_step, problem
from rematplan.ir import TrainingGraph, load_problem, show_bytes
from rematplan.models import ZOO
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.min_budget_plan import MIN_BUDGET, cheapest_near_smallest_peak
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak_in_stages
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.effort import Effort
from rematplan.planner.strategies.store_all import no_recompute

MULTIPLES = (1.0, 1.01, 1.05, 1.1, 1.2)
"""Of the smallest peak found: where the overhead is stated."""
COLUMNS = ("problem", "ops", "no recompute", "smallest found", "proven least", "ratio", "seconds")
WIDTHS = (24, 6, 12, 14, 12, 7, 8, *(7 for _ in MULTIPLES))


def problems(names: list[str], device_model: str) -> Iterator[TrainingGraph]:
    """Yield the planning problem of each network of the zoo or problem file named in ``names``.

    ``device_model``: models the costs of networks.
    """
    for name in names:
        if name in ZOO:
            yield problem(load_step(name, weightless=True), device_model)
        else:
            yield load_problem(Path(name))


def line(*cells: object) -> str:
    """Return cells as one line of text in columns: the first is left-aligned, the others right-aligned."""
    first, *others = map(str, cells)
    return " ".join(
        [f"{first:<{WIDTHS[0]}}", *(f"{c:>{w}}" for c, w in zip(others, WIDTHS[1:], strict=True))]
    )


def searched(graph: TrainingGraph, seconds: float) -> str:
    """Search the smallest peak of a problem, then cheap plans near it, for at most ``seconds`` each; return the table's
    line for it."""
    effort = Effort(seconds)
    least = find_smallest_peak_in_stages(graph, effort)
    spent, found, proven = effort.spent(), least.peak, min_peak_bound(graph).bytes
    lean = cheapest_near_smallest_peak(graph, seconds, slack=MIN_BUDGET.slack, starts=[least])
    sizes = (show_bytes(n) for n in (no_recompute(graph).peak, found, proven))
    overheads = (
        min(
            (extra for peak, extra in lean.near if peak <= int(multiple * found)),
            default=least.estimate.overhead,
        )
        for multiple in MULTIPLES
    )
    return line(
        graph.name[: WIDTHS[0]], len(graph.ops), *sizes, f"{found / proven:.3f}", f"{spent:.1f}",
        *(f"{100 * extra:.1f}" for extra in overheads),
    )  # fmt: skip


def main() -> None:
    """Search all named problems, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(ZOO), metavar="NAME|FILE")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each search, at most")
    parser.add_argument("--device-model", default="a100", metavar="NAME")
    options = parser.parse_args()
    compile_kernels()  # before any clock starts
    print(line(*COLUMNS, *(f"{multiple:g} ×" for multiple in MULTIPLES)), flush=True)
    for graph in problems(options.names, options.device_model):
        print(searched(graph, options.seconds), flush=True)


if __name__ == "__main__":
    main()
