"""How long training waits for a plan, and what it loses until the best plan is there.

usage: python benchmarks/first_step.py [NAME ...] [--threads 1 2] [--caches none kernels plans] [--time-limit 30]

Each row is a process of its own that starts with these caches: none; the planner's compiled loops; these and the plans
and costs of the row before. Seconds count from the call of `plan_module` (for peers: from the first forward), so that
capturing and profiling are in them, and importing PyTorch is not:

- first: until the end of the first step, and of these what the costs and the search took;
- best: until a plan is in use whose overhead is within .1 point of the last one's, and that overhead;
- speed: steps per second until the search ended, as a share of eager mode's alone on the machine;
- planner: CPU seconds of the process that searches.

Peers: `torch.compile` with an activation memory budget of as large a share, split by the min-cut partitioner without a
compiler behind it, and `torch.utils.checkpoint` per block. With one thread PyTorch trains on one core and the planner
searches on another; with as many threads as cores they compete.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
from drop_in_vs_peers import Case, checkpointed, network, partitioned
from one_step import stepper
from torch import nn

import rematplan
from rematplan.ir.cache_folder import cache_folder
from rematplan.models import example_inputs
from rematplan.models.resnet import Residual
from rematplan.models.transformer import Block
from rematplan.planner.background import shared

SHARE = 0.6
"""The budget: this share of the activations."""
POINT = 0.001
STEPS, SECONDS = 3, 6.0
"""Speeds are of at least so many steps and seconds."""
GPT = {"batch": 4, "tokens": 128, "width": 256, "vocabulary": 2000}
CASES = {
    c.name: c
    for c in (
        Case("gpt12", "gpt12", {**GPT, "depth": 12}, Block),
        Case("bert12", "bert", {**GPT, "depth": 12}, Block),
        Case("resnet50", "resnet50", {"batch": 8, "image": 96}, Residual),
        Case("unet", "unet", {"batch": 2, "image": 128, "width": 32}, nn.Sequential),
        Case("3000 ops", "gpt12", {"batch": 4, "tokens": 64, "width": 64, "vocabulary": 500, "depth": 100}, Block),
    )
}  # fmt: skip
CACHES = ("none", "kernels", "plans")


class Times(logging.Handler):
    """A log handler that keeps the seconds that a first plan took. ``costs``: measuring ops. ``search``: searching."""

    costs = search = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the seconds of a log line about a plan; other lines are ignored."""
        if "costs" in str(record.msg):
            self.costs, self.search = map(float, record.args[-2:])  # type: ignore[arg-type, misc, index]


def timed(step: Callable[[], None], began: float, go_on: Callable[[], bool] = lambda: False) -> list[float]:
    """Run at least `STEPS` steps and `SECONDS` seconds, and on while ``go_on()`` is true.

    Return the end of each step, in seconds since ``began``.
    """
    ends: list[float] = []
    while len(ends) <= STEPS or ends[-1] < ends[0] + SECONDS or go_on():
        step()
        ends.append(time.perf_counter() - began)
    return ends


def planned(case: Case, inputs: tuple[torch.Tensor, ...], time_limit: float) -> dict[str, Any]:
    """Plan a network and train it until the background search ends; return the measurements of the row by name."""
    times = Times()
    log = logging.getLogger("rematplan")
    log.addHandler(times)
    log.setLevel(logging.INFO)
    began = time.perf_counter()
    model = rematplan.plan_module(
        network(case),
        inputs,
        budget=f"{100 * SHARE:g}% of activations",
        strategy=rematplan.Auto(time_limit=time_limit),
    )
    step, overheads = stepper(model, inputs), list[float]()

    def one() -> None:
        step()
        overheads.append(model.plan.estimate.overhead)

    searches = rematplan.planning(model)
    ends = timed(one, began, lambda: bool(searches.stats().searching))
    step()  # takes the last plan
    last = model.plan
    overheads.append(last.estimate.overhead)
    ends.append(time.perf_counter() - began)
    near = next(at for at, found in enumerate(overheads) if found <= last.estimate.overhead + POINT)
    return {
        "first": ends[0],
        "costs": times.costs,
        "search": times.search,
        "best": ends[near],
        "overhead": 100 * last.estimate.overhead,
        "begun with": 100 * overheads[0],
        "speed": (len(ends) - 1) / (ends[-1] - ends[0]),
        "swaps": rematplan.planning(model).stats().swaps,
        "planner": cpu_seconds(shared().pid),
    }


def peer(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Train a model that needs no plan for a few steps.

    Return ``first``, the seconds until the end of the first step, and ``speed``, steps per second after it.
    """
    ends = timed(stepper(model, inputs), time.perf_counter())
    return {"first": ends[0], "speed": (len(ends) - 1) / (ends[-1] - ends[0])}


def compiled(case: Case, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Train under `torch.compile` with an activation memory budget. Return ``first`` (seconds) and ``speed`` (steps per
    second)."""
    began = time.perf_counter()
    try:
        model = partitioned(case, SHARE)  # which does a step
    except RuntimeError:
        # It recomputes batch norms, which change running statistics in place. Decomposed, they do not.
        torch._dynamo.reset()
        began, model = time.perf_counter(), network(case)
        with functorch_config.patch(activation_memory_budget=SHARE):
            model = cast(nn.Module, torch.compile(model, backend="aot_eager_decomp_partition"))
            stepper(model, inputs)()
    first, step = time.perf_counter() - began, stepper(model, inputs)
    ends = timed(step, time.perf_counter())
    return {"first": first, "speed": (len(ends) - 1) / (ends[-1] - ends[0])}


def eager(case: Case, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Train in eager mode for a few steps.

    Return ``first``, the seconds until the end of the first step, and ``speed``, steps per second after it.
    """
    ends = timed(stepper(network(case), inputs), time.perf_counter())
    return {"first": ends[0], "speed": (len(ends) - 1) / (ends[-1] - ends[0])}


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU seconds of a process and of its children, ended ones included; 0 for None."""
    if pid is None:
        return 0.0
    tick, rows = os.sysconf("SC_CLK_TCK"), dict[int, tuple[int, float]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        rows[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / tick

    def total(one: int) -> float:
        return rows.get(one, (0, 0.0))[1] + sum(total(k) for k, (parent, _) in rows.items() if parent == one)

    return total(pid)


def child(how: str, name: str, time_limit: float) -> None:
    """Measure one row in this process, and print it as JSON. ``how``: the method; ``name``: the network."""
    case = CASES[name]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    inputs = example_inputs(case.network, **case.sizes)
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        "eager": lambda: eager(case, inputs),
        "checkpoint": lambda: peer(checkpointed(case), inputs),
        "compile": lambda: compiled(case, inputs),
        "planned": lambda: planned(case, inputs, time_limit),
    }
    print(json.dumps(variants[how]()), flush=True)


def measured(how: str, name: str, threads: int, folder: Path, time_limit: float) -> dict[str, Any] | None:
    """Measure one row in a new process, and return it; None, with a printed line, if the process failed."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, "--child", how, name, "--time-limit", str(time_limit)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "XDG_CACHE_HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        check=False,
    )
    if done.returncode:
        print(f"  {how}: fails: {done.stderr.strip().splitlines()[-1][:160]}", flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def rows(name: str, threads: int, caches: list[str], time_limit: float) -> Iterator[str]:
    """Yield the rows of one network as text. ``caches``: for planned rows, the states of the caches at the start."""
    with tempfile.TemporaryDirectory() as base:
        plain = measured("eager", name, threads, Path(base) / "eager", time_limit)
        assert plain is not None
        speed = plain["speed"]
        yield f"  eager: {speed:.2f} steps/s"
        for how in ("checkpoint", "compile"):
            if found := measured(how, name, threads, Path(base) / how, time_limit):
                yield f"  {how}: first {found['first']:.2f} s; speed {found['speed'] / speed:.3f}"
        for cache in caches:
            folder = Path(base) / ("none" if cache == "none" else "kept")
            if cache != "none":
                (folder / "rematplan").mkdir(parents=True, exist_ok=True)
                if not (folder / "rematplan" / "kernels").exists():
                    (folder / "rematplan" / "kernels").symlink_to(cache_folder() / "kernels")
            if found := measured("planned", name, threads, folder, time_limit):
                yield (
                    f"  planned, caches {cache}: first {found['first']:.2f} s (costs {found['costs']:.1f}, search "
                    f"{found['search']:.1f}); best {found['best']:.1f} s, {found['begun with']:.2f} -> "
                    f"{found['overhead']:.2f} %, {found['swaps']} swaps; speed {found['speed'] / speed:.3f}; planner "
                    f"{found['planner']:.1f} CPU s"
                )


def main() -> None:
    """Measure each named network with each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.names[0], args.time_limit)
        return
    subprocess.run([sys.executable, "-m", "rematplan", "info", "warm", "--quiet"], check=True)
    for threads in args.threads:
        for name in args.names:
            print(f"{name}, {threads} threads, load {os.getloadavg()[0]:.1f}", flush=True)
            for row in rows(name, threads, args.caches, args.time_limit):
                print(row, flush=True)


if __name__ == "__main__":
    main()
