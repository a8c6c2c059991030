"""Train public architectures in place: whole or in parts, bits, peaks as shares of budgets, the share planned.

usage: python benchmarks/public_models.py [LIBRARY/NAME ...] [--list] [--budgets min 70%] [--time-limit 2] [--seconds S]

A name is one of `--list`, a pattern among them (`timm/vit*`), or any other model of timm, torchvision, smp
(segmentation_models_pytorch) or transformers, such as `timm/resnet50`. Sizes are small, weights and data random, the
models in training mode; nothing is downloaded. `pip install .[sweep]` installs the libraries; absent ones are skipped.
Each model is a process of its own. It trains for four steps in eager mode and, for each budget, with
`rematplan.apply`, from the same state and random numbers. The columns:

- plan: whole; parts; eager mode, if no part is worth a plan; or why there is none;
- bits: whether outputs, gradients, buffers, parameters and random states equal eager mode's after each step;
- each budget: the measured peak ÷ the budget, of the steps after the first in which no plan was made; ABOVE if it is
  larger; if the budget is infeasible, the least ÷ eager mode's peak;
- ÷ eager: the measured peak with the first feasible budget ÷ eager mode's;
- first step: its seconds with this budget: capture, measured costs and search included;
- planned: the share of the activations that planned modules hold.

Exit status 1 if bits differ, a peak exceeds its budget, or a model fails with something else than a refusal.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import importlib
import importlib.util
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from promise import step_of
from public_architectures import LIBRARIES, Batch
from torch import nn

import rematplan
from rematplan.ir import InfeasibleBudget, RematplanError, UsageError
from rematplan.module.plan_access import with_runner
from rematplan.module.verification import same_bits
from rematplan.runtime.costs.measure import bytes_of, peak_above_entry

STEPS = 4
FORK = multiprocessing.get_context("fork")


def seeded(seed: int) -> None:
    """Seed all random generators."""
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):
        generator(seed)


def plans(model: nn.Module) -> list[int]:
    """Return the identities of a model's plans; none for a model in eager mode."""
    with suppress(UsageError):
        return [id(plan) for plan in rematplan.planning(model).plans]
    return []


@dataclass(frozen=True)
class Trained:
    """What a training run left: the tensors of each step, the peak, and the seconds of the first step."""

    left: list[dict[str, torch.Tensor]]
    peak: int
    first: float


def train(model: nn.Module, batch: Callable[[], Batch]) -> Trained:
    """Train a model for some steps of plain gradient descent."""
    left, peaks, first = [], [0], 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(STEPS):
        seeded(number)
        args, kwargs = batch()
        optimizer.zero_grad(set_to_none=True)
        began = time.perf_counter()
        known = plans(model)
        peak, outputs = peak_above_entry(step_of(model, args, kwargs), torch.device("cpu"))
        first = first or time.perf_counter() - began
        if number and known == plans(model):
            peaks.append(peak + bytes_of((*model.parameters(), *model.buffers(), args, kwargs)))
        found = {f"output {k}": t for k, t in enumerate(outputs)} | {"random state": torch.get_rng_state()}
        found |= {f"gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found |= {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
        left.append(found)
    return Trained(left, max(peaks), first)


def differing(ours: Trained, theirs: Trained) -> list[str]:
    """Return the names of what differs after some step of two runs, the step first."""
    return [
        f"step {number}: {name}"
        for number, (a, b) in enumerate(zip(ours.left, theirs.left, strict=True))
        for name in sorted({*a, *b})
        if name not in a or name not in b or not same_bits(a[name], b[name])
    ]


def tried(name: str, budgets: Sequence[str], time_limit: float) -> dict[str, Any]:
    """Train a model in eager mode and under each budget; return the entries of its row."""
    library, _, model_name = name.partition("/")
    seeded(0)
    try:
        model, batch = LIBRARIES[library].make(model_name)
        model.train()
        eager = train(copy.deepcopy(model), batch)
    except Exception as error:  # of the library
        return {"plan": f"fails in eager mode: {type(error).__name__}: {error}"}
    row: dict[str, Any] = {}
    for budget in budgets:
        planned = rematplan.apply(
            copy.deepcopy(model), budget, strategy=rematplan.Auto(time_limit=time_limit), refine=False
        )
        try:
            found = train(planned, batch)
        except InfeasibleBudget as error:
            row[budget] = f"least {error.smallest / eager.peak:.0%}"
            continue
        except RematplanError as error:
            return row | {"plan": f"refused: {error}"}
        parts = with_runner(planned)._rematplan.parts  # type: ignore[attr-defined]
        bound = parts.last.plan.budget if parts else rematplan.planning(planned).plan.budget
        ratio = found.peak / bound
        row[budget] = (f"{ratio:.3f}" if ratio else "every step made a plan") + " ABOVE" * (ratio > 1)
        row.setdefault("plan", ("parts" if parts.last.plan.parts else "eager mode") if parts else "whole")
        row.setdefault("eager", f"{found.peak / eager.peak:.2f}" if ratio else "")
        row.setdefault("first", f"{found.first:.1f}")
        row.setdefault("planned", f"{parts.last.plan.share:.0%}" if parts else "100%")
        row.setdefault("bits", "equal")
        if differ := differing(found, eager):
            noisy = differing(train(copy.deepcopy(model), batch), eager)
            row["bits"] = (
                "eager mode differs from itself" if noisy else f"DIFFER: {len(differ)}, {differ[:3]}"
            )
    return row


def row_of(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the entries of a model's row, measured in a process of its own, which has the libraries already."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_child, args=(theirs, name, asked.budgets, asked.time_limit))
    process.start()
    theirs.close()
    try:
        if not ours.poll(asked.seconds):
            process.kill()
            return {"plan": f"takes more than {asked.seconds:g} s"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:  # it ended without an answer
        process.join()
        return {"plan": f"FAILS: exit status {process.exitcode}"}
    finally:
        process.join()


def _child(answer: Any, name: str, budgets: Sequence[str], time_limit: float) -> None:
    for stream in (1, 2):  # what libraries print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        answer.send(tried(name, budgets, time_limit))
    except Exception as error:  # a fault
        last = traceback.extract_tb(error.__traceback__)[-1]
        answer.send({"plan": f"FAILS: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"})


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the names of the models to try: those that match a pattern, and those that are named in full."""
    every = [f"{library}/{name}" for library, of in LIBRARIES.items() for name in of.names]
    found: dict[str, None] = {}
    for pattern in patterns:
        found.update(dict.fromkeys(fnmatch.filter(every, pattern) or [pattern]))
    return [*found]


def main() -> int:
    """Print the table and its summary; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["*"], metavar="LIBRARY/NAME")
    parser.add_argument("--budgets", nargs="+", default=["min", "70%"])
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds of search for a plan")
    parser.add_argument("--seconds", type=float, default=400.0, help="the most that a model may take")
    parser.add_argument("--list", action="store_true", help="print the names of the models, and end")
    asked = parser.parse_args()
    names = chosen(asked.names)
    if unknown := [name for name in names if name.partition("/")[0] not in LIBRARIES]:
        parser.error(f"{', '.join(unknown)}: a name is LIBRARY/NAME, with one of {', '.join(LIBRARIES)}")
    if asked.list:
        print("\n".join(names))
        return 0
    modules = {library: LIBRARIES[library].module for library in {name.partition("/")[0] for name in names}}
    absent = [library for library, module in modules.items() if importlib.util.find_spec(module) is None]
    for library in modules.keys() - absent:
        importlib.import_module(modules[library])
    columns = {"plan": "plan", "bits": "bits", **{one: one for one in asked.budgets}}
    columns |= {"eager": "÷ eager", "first": "first step, s", "planned": "planned"}
    print(f"| model | {' | '.join(columns.values())} |\n{'|---' * (1 + len(columns))}|", flush=True)
    kinds, bad = Counter[str](), 0
    for name in names:
        if name.partition("/")[0] in absent:
            continue
        row = row_of(name, asked)
        text = f"| {name} | {' | '.join(' '.join(str(row.get(one, '')).split()) for one in columns)} |"
        print(text, flush=True)
        kinds[row.get("plan", "infeasible").partition(":")[0]] += 1
        bad += any(word in text for word in (" ABOVE", "| DIFFER: ", "| FAILS: "))
    print(
        f"{kinds.total()} models: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}; {bad} with faults"
    )
    for library in absent:
        print(f"{library}: not installed (pip install .[sweep])")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
