"""Plan and simulate pipelines: peaks and extra time of each rank, dataflow over slow links, energy by a table of
devices.

    python benchmarks/pipelines.py [--quick] [--pictures FOLDER] [PART ...]

Plans are for an A100 by its roofline model, without workspaces. 1F1B runs on 4 ranks with 16 micro-batches.
Checkpointing runs each block of the network again (in reversible networks each pair of couplings); the budget of the
plans is the largest peak of a rank with checkpointing. ``training`` runs small networks in one process, action by
action in the order of the timeline. ``peaks``, ``zbv`` and ``timeline`` run gloo processes: planned stages whose peaks
are measured, and stages that sleep, whose makespan is compared with the simulated one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from dataflow_training import errors, training
from fpga_energy import energy
from pipeline_gloo import peaks, zbv
from pipeline_latency import latency
from pipeline_memory import depth, memory
from pipeline_sleep import sleeping

PARTS: dict[str, Callable[[bool, Path | None], None]] = {
    "memory": memory,
    "latency": latency,
    "depth": depth,
    "errors": errors,
    "training": training,
    "energy": energy,
    "peaks": peaks,
    "zbv": zbv,
    "timeline": sleeping,
}


def main() -> None:
    """Run the named parts, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.parts or PARTS:
        print(f"== {name}")
        PARTS[name](args.quick, args.pictures)


if __name__ == "__main__":
    main()
