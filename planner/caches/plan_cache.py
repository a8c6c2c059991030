"""Plans that earlier processes found for a problem, kept on disk, so that planning again begins where it ended.

What is kept is no more than a start: sequences of runs, priced anew when they are read, under a digest of the whole
problem, sizes and costs included. So a plan for a smaller budget serves a larger one in a later process too, and an
old or damaged file costs nothing but the start. Folder: ``$XDG_CACHE_HOME/rematplan/plans``, by default under
``~/.cache``.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.ir.problem_json import read_json, write_whole
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import pareto

MOST = 32
RUNS = 60_000
"""Plans kept of one problem, and runs in them together: more would take long to read. The latest are kept."""
FILES = 256
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
    rows = [[p.strategy, [number[name] for name in runs_of(p.schedule)]] for p in found if p in front][:MOST]
    while sum(len(runs) for _, runs in rows) > RUNS and len(rows) > 1:
        rows.pop()
    file = _file(graph)
    with suppress(OSError, ProblemError):  # a read-only home costs a later run its start, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(rows, separators=(",", ":")))
        for old in sorted(file.parent.glob("*.json"), key=lambda f: f.stat().st_mtime)[:-FILES]:
            old.unlink()


def _file(graph: TrainingGraph) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    sizes = [t.bytes for t in graph.tensors]
    prices = [[op.cost, op.workspace] for op in (*graph.ops, *graph.inverses)]
    digest = hashlib.sha256(json.dumps([graph.fingerprint, sizes, prices]).encode()).hexdigest()
    return base / "rematplan" / "plans" / f"{digest}.json"
