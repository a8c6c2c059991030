"""``rematplan demo``: export U-Net and ResNet-50 (or two tiny networks) to ONNX files, then plan, run and verify a
training step of each."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rematplan.cli import curve, step
from rematplan.cli.arguments import several_strategies
from rematplan.cli.export import write_network
from rematplan.cli.output import Output
from rematplan.cli.problem_source import price
from rematplan.ir import InfeasibleBudget
from rematplan.planner.core.plan import Plan
from rematplan.planner.registry import STRATEGIES
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.ilp import ILP
from rematplan.planner.strategies.reversible import Reversible
from rematplan.plans.budgets import parse_budget
from rematplan.plans.tradeoff import rows_at
from rematplan.runtime.costs.device_models import PROFILE

STEPS = 3
"""The number of timed steps."""
DRAWN = [name for name in STRATEGIES if name not in (Anneal.name, ILP.name, Reversible.name)]
"""The strategies whose curves are drawn. `auto` includes annealing, and neither network is reversible."""
TIME_LIMIT = 20.0
"""Seconds of search for the curve of `auto`, so that the whole demo takes a few minutes."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network of the demo and the budget for its training step."""

    name: str
    """The network's name in the zoo."""
    batch: int
    """The number of samples in a batch."""
    image: int
    """The side of the image in pixels."""
    width: int
    """The network's width, in channels."""
    budget: str
    """The budget as text, such as ``60%``."""


CASES = (Case("unet", 2, 192, 32, "60%"), Case("resnet50", 8, 224, 64, "60%"))
SMALL_CASES = (Case("unet", 2, 32, 4, "min"), Case("resnet18", 2, 32, 4, "min"))


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan demo`` to ``parser``."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="the folder for the files; default demo",
    )
    parser.add_argument("--small", action="store_true", help="tiny networks, for a quick look")


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan demo``: export, plan, run and verify two networks. Return the exit status: 0 if both were
    verified, otherwise 1."""
    args.folder.mkdir(parents=True, exist_ok=True)
    start, worst = time.perf_counter(), 0
    documents = []
    for case in SMALL_CASES if args.small else CASES:
        status, document = _run_case(case, args.folder, out)
        worst = worst or status
        documents.append(document)
    out.show(
        f"Done in {time.perf_counter() - start:.0f} s; ONNX files, pictures and tables are in {args.folder}/"
    )
    out.data({"folder": args.folder, "cases": documents})
    return worst


def _plan_from(trade_off: curve.TradeOff, budget: str) -> Plan:
    """Return the curves' plan of least overhead within a budget such as ``60%``; `InfeasibleBudget` if none fits."""
    base, stated = trade_off.base.estimate.peak, parse_budget(budget)
    every = {"auto": [p for plans in trade_off.curves.values() for p in plans]}
    (row,) = rows_at(every, [stated], base, trade_off.whole)
    limit = stated.bytes(base, lambda: row.smallest, trade_off.whole)
    if row.plan is None:
        raise InfeasibleBudget(row.strategy, limit, row.smallest, "searched")
    return replace(row.plan, budget=limit)


def _run_case(case: Case, folder: Path, out: Output) -> tuple[int, dict[str, Any]]:
    """Export a network, load and plan it, draw its trade-off, and run a step. Return the exit status, 0 if the step was
    verified, else 1, and the JSON document."""
    from rematplan import api

    onnx = folder / f"{case.name}.onnx"
    out.show(
        f"── {case.name}, batch {case.batch}, image {case.image}, width {case.width}: exporting to {onnx}"
    )
    with out.progress(f"exporting {case.name}"):
        write_network(case.name, {"batch": case.batch, "image": case.image, "width": case.width}, onnx)
    out.show(f"   loading {onnx}, capturing its training step, measuring its ops")
    with out.progress("capturing the training step"):
        loaded = api.load_step(onnx, dims={"batch": case.batch})
    source = price(loaded, out, PROFILE)
    out.show(f"   {len(source.graph.ops)} ops; planning")
    budgets = [parse_budget(text) for text in curve.BUDGETS]
    strategies = several_strategies(DRAWN, {"time_limit": TIME_LIMIT})
    trade_off = curve.trace(source, strategies, budgets, out)
    trade_off = curve.prove(trade_off, strategies, out)
    curve.show(trade_off, out)
    curve.write(trade_off, folder / f"{case.name}.png", folder / f"{case.name}.csv")
    plan = _plan_from(trade_off, case.budget)
    out.show(f"   picture: {folder / case.name}.png; running a step within {case.budget}")
    report = step.run_plan(loaded, plan, out, STEPS, True)
    document = {"model": case.name, "budget": plan.budget, "peak": plan.estimate.peak}
    return step.exit_status(report), document | step.step_document(report)
