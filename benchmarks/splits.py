"""Plans of networks whose largest ops are split along rows, against plans of the whole ops.

usage: python benchmarks/splits.py [NAME ...] [--shares .5 .4 .3 .2] [--seconds 10] [--device-model a100]

NAME is a network of the zoo, at its default sizes; a U-Net has 4 images of 512 × 512 and 19 classes. A share is that of
the activations without splits: inputs and gradients stay whole. Each line states the splits, the smallest peak that is
proven necessary for them (for ``auto``, for all splits), and the time of the plan for each share, relative to the step
without splits and recomputation.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from rematplan.api import Sizes, load_step
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.options import PlanOptions, Splits
from rematplan.plans.planner import Planner
from rematplan.plans.split_floor import split_floor
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.split.regions import find_regions
from rematplan.runtime.split.split_step import splittable

NETWORKS = ("gpt12", "bert", "vit_s", "unet")
SIZES = {"unet": Sizes(batch=4, image=512, classes=19)}


def cells(step: CapturedStep, split: Splits, shares: list[float], strategy: Auto, costs: str) -> list[str]:
    """Return the time of the plan for each share, or why there is none."""
    whole = Planner(PlanOptions(budget="100%", costs=costs, refine=False))
    base = no_recompute(whole.inverting_problem(step)).estimate.cost
    found = []
    for share in shares:
        budget = f"{100 * share:g}% of activations"
        options = PlanOptions(budget=budget, strategy=strategy, costs=costs, refine=False, split=split)
        try:
            made = Planner(options).plan(replace(step))
            found.append(f"{made.plan.estimate.cost / base:.4f}")
        except InfeasibleBudget as error:
            found.append(f"least {show_bytes(error.smallest)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NETWORKS)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.4, 0.3, 0.2])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--device-model", default="a100")
    args = parser.parse_args()
    strategy = Auto(time_limit=args.seconds)
    print("| network | split | proven least | " + " | ".join(f"{s:g}" for s in args.shares) + " |")
    print("|" + "---|" * (3 + len(args.shares)))
    for name in args.names:
        step = load_step(name, sizes=SIZES.get(name, Sizes()), weightless=True).bare
        regions = splittable(step, find_regions(step))
        heads: list[Splits] = (
            [(("loss", k),) for k in (8, 16)] if any(r.name == "loss" for r in regions) else []
        )
        for split in ("off", *heads, "auto"):
            planner = Planner(PlanOptions(budget="least", costs=args.device_model, refine=False, split=split))
            if split == "auto":
                least = split_floor(step, planner.inverting_problem(step), regions).bytes
            else:
                least = min_peak_bound(planner.inverting_problem(planner.rewritten(step).step)).bytes
            row = cells(step, split, args.shares, strategy, args.device_model)
            text = split if isinstance(split, str) else ", ".join(f"{n} in {k}" for n, k in split)
            print(f"| {name} | {text} | {show_bytes(least)} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
