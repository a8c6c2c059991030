"""Plans that earlier processes found for a problem, kept on disk, so that planning again begins where it ended.

What is kept is no more than a start: sequences of runs, priced anew when they are read, under a digest of the whole
problem, sizes and costs included. So a plan for a smaller budget serves a larger one in a later process too, and an
old or damaged file costs nothing but the start. Folder: ``plans`` in
`ir.cache_folder`.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.ir.cache_folder import cache_folder
from rematplan.ir.problem_json import read_json, write_whole
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import pareto

PLANS_KEPT = 32
RUNS_KEPT = 60_000
"""Plans kept of one problem, and runs in them together: more would take long to read. The latest are kept."""
PROBLEMS_KEPT = 256
"""Problems of which plans are kept: those not planned for longest are dropped."""


def kept_plans(graph: TrainingGraph) -> tuple[Plan, ...]:
    """The plans kept of a problem, the latest first; none where there is no file, or one that says something else."""
    names = [op.name for op in (*graph.ops, *graph.inverses)]
    try:
        rows: Any = read_json(_file(graph))
        return tuple(plan_from_runs(graph, [names[k] for k in runs], str(found)) for found, runs in rows)
    except (ProblemError, TypeError, ValueError, LookupError):
        return ()


def keep_plan(graph: TrainingGraph, plan: Plan) -> None:
    """Keep a plan beside those that are kept, without those that are no better in any way than another."""
    found = tuple(dict.fromkeys((plan, *kept_plans(graph))))
    front = pareto(found)
    number = {op.name: k for k, op in enumerate((*graph.ops, *graph.inverses))}
    rows = [[p.strategy, [number[name] for name in runs_of(p.schedule)]] for p in found if p in front][
        :PLANS_KEPT
    ]
    while sum(len(runs) for _, runs in rows) > RUNS_KEPT and len(rows) > 1:
        rows.pop()
    file = _file(graph)
    with suppress(OSError, ProblemError):  # a read-only home costs a later run its start, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(rows, separators=(",", ":")))
        for old in sorted(file.parent.glob("*.json"), key=lambda f: f.stat().st_mtime)[:-PROBLEMS_KEPT]:
            old.unlink()


def _file(graph: TrainingGraph) -> Path:
    sizes = [t.bytes for t in graph.tensors]
    prices = [[op.cost, op.workspace] for op in (*graph.ops, *graph.inverses)]
    digest = hashlib.sha256(json.dumps([graph.fingerprint, sizes, prices]).encode()).hexdigest()
    return cache_folder() / "plans" / f"{digest}.json"
