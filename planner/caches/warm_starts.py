"""Convert a plan to a start for another problem of the same step, such as one with inverses."""

from __future__ import annotations

from collections.abc import Iterable

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of, without_idle


def transfer_plan(plan: Plan, graph: TrainingGraph) -> Plan | None:
    """Convert a plan to one of ``graph``, with runs matched by name and new ops inserted; None if the result is invalid
    or breaks ``graph.ordered``."""
    known = [r for r in runs_of(plan.schedule) if r in graph.op]
    shared = set(known)
    runs = _with_new(graph, shared, known)
    runs = without_idle(graph, runs, [r in shared for r in runs])
    ordered = set(graph.ordered)
    if tuple(name for name in dict.fromkeys(runs) if name in ordered) != graph.ordered:
        return None
    try:
        return plan_from_runs(graph, runs, plan.strategy)
    except ProblemError:
        return None


def _with_new(graph: TrainingGraph, shared: set[str], runs: Iterable[str]) -> list[str]:
    """Return ``runs`` with the ops of ``graph`` inserted that are not in ``shared``. Those that need no op of
    ``shared`` come first, others after each run that completes or renews what they read."""
    made, found = set(graph.inputs), []
    for op in (op for op in graph.ops if op.name not in shared and made.issuperset(op.reads)):
        found.append(op.name)
        made.update(op.writes)
    for first in runs:
        waiting = [first]
        while waiting:
            name = waiting.pop()
            found.append(name)
            made.update(graph.op[name].writes)
            read = (r for t in graph.op[name].writes for r in graph.readers.get(t, ()))
            new = dict.fromkeys(r for r in read if r not in shared)
            waiting += [r for r in reversed(new) if made.issuperset(graph.op[r].reads) and r not in waiting]
    return found
