"""Measure the executor's cost: the schedule that recomputes nothing against eager autograd, alternately in one
process.

usage: python benchmarks/store_all_vs_eager.py [NAME] [--batch 8] [--image 224] [--width 64] [--rounds 7]

Prints the least and the median step time of each, and their ratios. Without recomputation both run the same kernels,
so the ratio is the cost of the generated function; its limit is 1.05.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from rematplan import api
from rematplan.module.verification import run_once
from rematplan.step_measurement import planned_step

LIMIT = 1.05


def main() -> int:
    """Measure and print. Return the exit status: 1 if the ratio of the least times is above `LIMIT`, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="resnet50")
    for option, default in (("batch", 8), ("image", 224), ("width", 64), ("rounds", 7)):
        parser.add_argument(f"--{option}", type=int, default=default)
    args = parser.parse_args()
    loaded = api.load_step(args.name, sizes=api.Sizes(args.batch, args.image, args.width))
    plan = api.no_recompute(api.problem(loaded))
    planned = planned_step(loaded, plan)

    def run(step: Callable[[], object]) -> float:
        loaded.module.zero_grad(set_to_none=True)
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    calls = {
        "eager": lambda: run_once(loaded.module, loaded.batch),
        "store_all": lambda: run_once(planned, loaded.batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(args.rounds + 1):
        for name, call in calls.items():
            took = run(call)
            if at:  # the first round warms up
                seconds[name].append(took)
    least = {name: min(times) for name, times in seconds.items()}
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name in calls:
        print(f"{name:10} least {least[name]:.3f} s, median {median[name]:.3f} s")
    ratio = least["store_all"] / least["eager"]
    print(f"store_all ÷ eager: least {ratio:.3f}, median {median['store_all'] / median['eager']:.3f}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
