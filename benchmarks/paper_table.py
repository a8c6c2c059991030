"""Repeat table 1 of Kusumoto et al. 2019 («A graph theoretic framework of recomputation algorithms for
memory-efficient backpropagation», arXiv:1905.11722): the seven networks at the paper's batch sizes, with the
paper's figures and ours.

Images are 224×224, except 713×713 for PSPNet and 448×448 for U-Net; with that size its peak without recomputation is
nearest the paper's U-Net (which does not pad its convolutions and has no batch norm). GoogLeNet's response norms are
written out and hold more than the paper's fused ones. Peaks are simulated, with tensors freed at their last use; 1 GB
is 10⁹ bytes. The last columns are the share of the peak that is saved at the smallest budget, and the overhead of a
plan within the paper's best peak (both peaks as shares of the peak without recomputation). Costs come from the
roofline model of an a100.

usage: python benchmarks/paper_table.py [--only NAME ...] [--seconds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from networks import NETWORKS, base_plan, block_curves

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.core.plan import Plan


@dataclass(frozen=True)
class Row:
    """Peaks in GB that Kusumoto et al. (2019) publish, with tensors freed at their last use.

    ``vanilla``: without recomputation. ``chen``: by Chen's algorithm. ``approx``, ``exact``: by the memory-centric
    forms of the paper's two dynamic programs.
    """

    vanilla: float
    chen: float
    approx: float
    exact: float

    @property
    def best(self) -> float:
        """The smaller peak of both dynamic programs ÷ the peak without recomputation."""
        return min(self.approx, self.exact) / self.vanilla


PAPER: Mapping[str, Row] = {
    "pspnet": Row(9.4, 4.0, 2.7, 2.8),
    "unet": Row(9.1, 7.4, 5.0, 4.7),
    "resnet50": Row(8.9, 3.7, 3.4, 3.4),
    "resnet152": Row(9.2, 2.4, 2.3, 2.3),
    "vgg19": Row(7.0, 4.7, 4.5, 4.5),
    "densenet161": Row(8.5, 1.8, 1.6, 1.7),
    "googlenet": Row(8.5, 6.5, 5.2, 5.2),
}


def leanest(graph: TrainingGraph) -> dict[str, Plan]:
    """Return the plan of the smallest peak of ``chen``, ``approx`` and ``exact``; those for which the graph is too
    large are absent."""
    found: dict[str, Plan] = {}
    for strategy, curve in block_curves(graph):
        name = strategy.partition("_")[0]
        if name not in found or curve[-1].estimate.peak < found[name].estimate.peak:
            found[name] = curve[-1]
    return found


def line(name: str, seconds: float) -> str:
    """Return the row of a network as text: the paper's peaks, our peaks, and the overhead at the paper's best peak.

    ``seconds``: of each search.
    """
    _, graph = NETWORKS[name].load()
    paper, base, blocks = PAPER[name], base_plan(graph).estimate.peak, leanest(graph)
    least = cheapest_near_smallest_peak(graph, seconds, starts=tuple(blocks.values()))
    try:
        plan = Auto(time_limit=seconds, reuse=False).plan(graph, int(paper.best * base))
        at_paper = f"{1 + plan.estimate.overhead:.3f} (≥ {1 + (plan.lower_bound or 0.0):.3f})"
    except InfeasibleBudget:
        at_paper = "out of reach"
    ours = [
        f"{blocks[k].estimate.peak / 1e9:.2f}" if k in blocks else "–" for k in ("chen", "approx", "exact")
    ]
    theirs = (paper.vanilla, paper.chen, paper.approx, paper.exact)
    return (
        f"{name:>12} {len(graph.ops):>5} | {' '.join(f'{n:>6}' for n in theirs)} {100 * (1 - paper.best):>5.0f} % | "
        f"{base / 1e9:>6.2f} {' '.join(f'{n:>6}' for n in ours)} {least.estimate.peak / 1e9:>6.2f} "
        f"{100 * (1 - least.estimate.peak / base):>5.0f} % {1 + least.estimate.overhead:>6.2f} | "
        f"{100 * paper.best:>4.0f} %: {at_paper}"
    )


def main() -> None:
    """Print the row of each chosen network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PAPER, default=list(PAPER), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each plan")
    options = parser.parse_args()
    compile_kernels()
    columns = " ".join(f"{n:>6}" for n in ("plain", "Chen", "approx", "exact"))
    print(
        f"{'GB':>12} {'ops':>5} | {columns}   saved | {columns}  least   saved   time | at the paper's peak"
    )
    for name in options.only:
        print(line(name, options.seconds), flush=True)


if __name__ == "__main__":
    main()
