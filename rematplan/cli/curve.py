"""``rematplan curve``: show the trade-off between memory and overhead as a table, a picture and a CSV file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rematplan.cli.arguments import add_strategy_options, check_outputs, several_strategies, strategy_options
from rematplan.cli.output import Output
from rematplan.cli.problem_source import Source, add_costs, add_model, costs_of, is_problem, load
from rematplan.cli.rewriting import add_rewriting, refuse_rewriting, rewriting_options, stated_rewriting
from rematplan.cli.size_range import draw_sizes, spanned
from rematplan.ir import TrainingGraph, UsageError, show_bytes
from rematplan.ir.files import write_whole
from rematplan.planner.annealing.filling import plans_between
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.bounds.bound_search import lower_bound
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, Strategy, pareto
from rematplan.planner.registry import STRATEGIES
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import StoreAll, no_recompute
from rematplan.plans.budget_searches import least_plan
from rematplan.plans.budgets import Budget, parse_budget, whole_bytes
from rematplan.plans.tradeoff import curves_csv, key, rows_at, spread, trace_curves
from rematplan.report.tables import measured_table, trade_off_table

if TYPE_CHECKING:
    from rematplan.api import MeasuredPlan

BUDGETS = ("80%", "70%", "60%", "50%", "40%", "min")
MEASURED_PLANS = 5
"""The number of plans along the best curve that ``--measure`` runs."""
ROUNDS = 5
"""How many times ``--measure`` runs each plan, alternately with the others."""
FLOORS, FLOOR_SHARE = 10, 0.2
"""The picture shows proven lower bounds of the overhead at ``FLOORS`` + 1 budgets. The proofs take the share
``FLOOR_SHARE`` of a curve's time limit."""
LEAST_SHARE = 0.2
"""The time for finding plans with the smallest peak, as a share of a curve's time limit. It is spent in addition to
that limit."""
FILLED, FILL_SHARE = 30, 0.15
"""The curve has plans at up to ``FILLED`` further budgets, from the smallest peak up. Their search takes the share
``FILL_SHARE`` of a curve's time limit, in addition to that limit."""


@dataclass(frozen=True)
class TradeOff:
    """The trade-off between memory and overhead of one planning problem."""

    source: Source
    """The problem."""
    base: Plan
    """The plan without recomputation, and without splits."""
    whole: int
    """The bytes of the step's inputs (parameters, buffers, batch) and outputs (gradients). A budget such as ``50% of
    activations`` includes them in full."""
    curves: Mapping[str, Sequence[Plan]]
    """By strategy, its plans by rising overhead and falling peak."""
    budgets: Sequence[Budget]
    """The budgets for which the table has rows."""
    notes: tuple[str, ...]
    """Sentences for the user."""
    measured: tuple[MeasuredPlan, ...] = ()
    """Measurements of the plan without recomputation, then of other plans, last of plain autograd; empty without
    ``--measure``."""
    floors: tuple[tuple[int, float], ...] = ()
    """Pairs of a budget in bytes and the proven lower bound of the overhead within it; empty without ``--png``."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan curve`` to ``parser``."""
    add_model(parser, problem_file=True, ranges=True)
    add_costs(parser)
    parser.add_argument(
        "--strategy",
        action="append",
        metavar="NAME",
        help=f"a strategy to trace, one of {', '.join(STRATEGIES)}; may be repeated; default all",
    )
    parser.add_argument(
        "--budget",
        action="append",
        metavar="SIZE",
        help=f"a row of the table (written as for plan); may be repeated; default {', '.join(BUDGETS)}".replace(
            "%", "%%"
        ),
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curves")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all points of the curves")
    parser.add_argument(
        "--measure",
        action="store_true",
        help=f"run up to {MEASURED_PLANS} of the best plans on this machine, {ROUNDS} times each, alternately",
    )
    add_rewriting(parser, curve=True)
    add_strategy_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan curve``: compute trade-off curves, show them, write the requested files, and return 0.
    `UsageError` for options of a model with a problem file, and of one size with a range."""
    check_outputs(args.png, args.csv)
    if args.measure and is_problem(args):
        raise UsageError("--measure needs a model, and a problem file does not contain one")
    if is_problem(args) or spanned(args):
        refuse_rewriting(args, "needs a model at one size")
    if spanned(args):
        return draw_sizes(args, out)
    budgets = [parse_budget(text) for text in dict.fromkeys(args.budget or BUDGETS)]
    names = list(dict.fromkeys(args.strategy or STRATEGIES))
    strategies = several_strategies(names, strategy_options(args))
    opened = load(args, out, runs=args.measure)
    source = rewritten(opened, args, budgets, out)
    if not (args.strategy or source.graph.inverses):
        del strategies[Reversible.name]  # without inverses it equals store_all
    unsplit = opened.graph if args.split else None
    trade_off = trace(source, strategies, budgets, out, unsplit)
    if args.measure:
        trade_off = measure(trade_off, out)
    if args.png:
        trade_off = prove(trade_off, strategies, out)
    show(trade_off, out)
    write(trade_off, args.png, args.csv)
    out.data(document(trade_off) | {"files": {"png": args.png, "csv": args.csv}})
    return 0


def rewritten(source: Source, args: argparse.Namespace, budgets: Sequence[Budget], out: Output) -> Source:
    """Return the problem of the step with the splits and kernels that the arguments state; ``source`` itself if they
    state none. Splits are chosen for the lowest of ``budgets``."""
    loaded = source.loaded
    if loaded is None or not rewriting_options(args):
        return source
    from rematplan.plans.options import PlanOptions
    from rematplan.plans.planner import Planner

    peak, whole = no_recompute(source.graph).peak, whole_bytes(source.graph)
    lowest = min(budgets, key=lambda b: b.bytes(peak, lambda: 0, whole))
    options = PlanOptions(
        budget=lowest.text,
        costs=costs_of(args),
        inverses=args.inverses,
        refine=False,
        **stated_rewriting(args),
    )
    planner = Planner(options, named=loaded.named)
    with out.progress(f"changing the ops of {source.graph.name}") as progress:
        changed = planner.rewritten(loaded.bare, first=True)
        step = planner.with_inverses(changed.step)
        graph = planner.problem(step, progress)
    loaded = replace(loaded, step=step, inexact=loaded.inexact or bool(changed.notes))
    return Source(graph, loaded, (*source.notes, *changed.notes))


def trace(
    source: Source,
    strategies: Mapping[str, Strategy],
    budgets: Sequence[Budget],
    out: Output,
    of: TrainingGraph | None = None,
) -> TradeOff:
    """Return the trade-off curves of the strategies that have one for a problem; `UsageError` if none has. ``of``: the
    problem of which budgets are percentages; None: the same one."""
    base, whole = no_recompute(of or source.graph), whole_bytes(of or source.graph)
    amounts = [b.bytes(base.estimate.peak, lambda: 0, whole) for b in budgets if not b.is_lean]
    chosen = strategies if infer_phases(source.graph).has_phases else _without_blocks(strategies)
    with out.progress(f"planning {source.graph.name}") as progress:
        curves, notes = trace_curves(source.graph, chosen, amounts, progress)
    if not curves:
        raise UsageError("; ".join(notes))
    searching = [(n, s) for n, s in chosen.items() if n in curves and isinstance(s, (Auto, Anneal))]
    lean = [b.kind for b in budgets if b.is_lean]
    if searching and lean:
        name, searcher = searching[0]
        with out.progress(f"lowering the peak of {source.graph.name}") as progress:
            limit = LEAST_SHARE * searcher.time_limit
            starts = [plans[-1] for plans in curves.values()]
            found = [
                least_plan(searcher, source.graph, progress, kind=kind, time_limit=limit, starts=starts)
                for kind in lean
            ]
        curves[name] = pareto([*curves[name], *found])
    for name, searcher in searching[:1]:
        with out.progress(f"filling the curve of {source.graph.name}") as progress:
            curves[name] = pareto([*curves[name], *_between(source.graph, searcher, curves[name], progress)])
    return TradeOff(source, base, whole, curves, budgets, (*source.notes, *notes))


def _between(
    graph: TrainingGraph, searcher: Auto | Anneal, known: Sequence[Plan], progress: Progress
) -> list[Plan]:
    """Return plans between the known ones; none if the order of first runs must be kept."""
    if searcher.keep_order:
        return []
    moves = searcher.counted if isinstance(searcher, Auto) else searcher.moves
    effort = Effort(FILL_SHARE * searcher.time_limit, int(FILL_SHARE * moves))
    return plans_between(graph, known, effort, progress, count=FILLED, seed=searcher.seed)


def prove(trade_off: TradeOff, strategies: Mapping[str, Strategy], out: Output) -> TradeOff:
    """Return the trade-off with proven lower bounds of the overhead at `FLOORS` + 1 evenly spaced budgets. They go
    from the peak without recomputation to the smallest peak of its plans. Together the proofs take `FLOOR_SHARE` of the
    longest time limit of ``strategies``."""
    graph = trade_off.source.graph
    base = no_recompute(graph).peak
    least = min(p.estimate.peak for plans in trade_off.curves.values() for p in plans)
    budgets = [base - (base - least) * k // FLOORS for k in range(FLOORS + 1)]
    limits = [s.time_limit for s in strategies.values() if isinstance(s, (Auto, Anneal))]
    seconds = FLOOR_SHARE * max(limits, default=FLOORS) / len(budgets)
    floors = []
    with out.progress(f"proving floors of {graph.name}") as progress:
        for done, budget in enumerate(budgets):
            progress(done / len(budgets), show_bytes(budget))
            floors.append((budget, lower_bound(graph, budget, seconds).overhead))
    return replace(trade_off, floors=tuple(floors))


def measure(trade_off: TradeOff, out: Output) -> TradeOff:
    """Run the plan without recomputation, up to `MEASURED_PLANS` Pareto-optimal plans and plain autograd
    alternately. Return them with the trade-off."""
    from rematplan import api

    loaded = trade_off.source.loaded
    assert loaded is not None
    best = pareto(p for plans in trade_off.curves.values() for p in plans)
    chosen = [
        no_recompute(trade_off.source.graph),
        *(p for p in spread(best, MEASURED_PLANS) if p.estimate.reruns),
    ]
    with out.progress("running plans") as progress:
        measured = api.measure_plans(loaded, chosen, rounds=ROUNDS, progress=progress)
    return replace(trade_off, measured=measured)


def show(trade_off: TradeOff, out: Output) -> None:
    """Print the notes, the table of plans by budget and, if plans were run, the table of their measurements."""
    name, base = trade_off.source.graph.name, trade_off.base
    rows = rows_at(
        _without_store_all(trade_off.curves), trade_off.budgets, base.estimate.peak, trade_off.whole
    )
    out.show(*trade_off.notes, trade_off_table(name, base, rows))
    if trade_off.measured:
        out.show(measured_table(name, trade_off.measured))


def write(trade_off: TradeOff, png: Path | None, csv: Path | None) -> None:
    """Write the curves, with measurements if any, as a picture and as a table. A file whose path is None is not
    written."""
    if csv:
        eager = trade_off.measured[-1:]
        measured = {
            key(m.plan): (m.peak, median(m.seconds), median(eager[0].seconds))
            for m in trade_off.measured
            if m.plan
        }
        write_whole(csv, curves_csv(trade_off.curves, trade_off.base, measured))
    if png:
        from rematplan.report.plot import Floors, MeasuredPoint, save_trade_off  # matplotlib is slow to load

        base = trade_off.measured[0] if trade_off.measured else None
        points = [MeasuredPoint(m.peak, *m.overheads(base)) for m in trade_off.measured[:-1] if base]
        graph = trade_off.source.graph
        title = f"{graph.name}: memory against time of a training step"
        floors = Floors(min_peak_bound(graph).bytes, trade_off.floors)
        save_trade_off(png, title, trade_off.curves, trade_off.base, points, floors)


def document(trade_off: TradeOff) -> dict[str, Any]:
    """Return the JSON output of ``rematplan curve``. Peaks are in bytes. Overheads are fractions of the step's time
    without recomputation."""
    base = trade_off.base.estimate
    plans = [p for curve in trade_off.curves.values() for p in curve]
    rows = rows_at(trade_off.curves, trade_off.budgets, base.peak, trade_off.whole)
    return {
        "problem": trade_off.source.graph.name,
        "notes": list(trade_off.notes),
        "no_recompute_peak": base.peak,
        "smallest_peak": min(p.estimate.peak for p in plans),
        "curves": {name: [_point(p) for p in curve] for name, curve in trade_off.curves.items()},
        "table": [
            {"budget": r.budget, "strategy": r.strategy, "smallest_peak": r.smallest}
            | (_point(r.plan) if r.plan else dict.fromkeys(("peak", "overhead", "ops_recomputed")))
            for r in rows
        ],
        "measured": _measured(trade_off.measured),
    }


def _measured(measured: Sequence[MeasuredPlan]) -> list[dict[str, Any]]:
    """Return the JSON output of plans that were run: peak, median seconds, and least, median and largest overhead.
    ``measured``: first the plan that overheads are relative to, last plain autograd."""
    return [
        _point(m.plan)
        | {"strategy": m.plan.strategy, "measured_peak": m.peak, "seconds": median(m.seconds)}
        | {"overhead_measured": list(m.overheads(measured[0])), "rounds": len(m.seconds)}
        | {"eager_peak": measured[-1].peak, "eager_seconds": median(measured[-1].seconds)}
        for m in measured
        if m.plan
    ]


def _point(plan: Plan) -> dict[str, Any]:
    e = plan.estimate
    return {"peak": e.peak, "overhead": e.overhead, "ops_recomputed": e.reruns}


def _without_store_all(curves: Mapping[str, Sequence[Plan]]) -> Mapping[str, Sequence[Plan]]:
    """Return the curves for the table: without ``store_all``, whose plan is the first row, unless it is alone."""
    others = {name: plans for name, plans in curves.items() if name != StoreAll.name}
    return others or curves


def _without_blocks(strategies: Mapping[str, Strategy]) -> Mapping[str, Strategy]:
    """Return the strategies that do not divide the forward into blocks, for ops without phases; all if there are
    none, to show their errors."""
    from rematplan.planner.strategies.block_strategy import CandidateStrategy

    return {n: s for n, s in strategies.items() if not isinstance(s, CandidateStrategy)} or strategies
