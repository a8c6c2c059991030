"""A plan of one problem as a start for another of the same step, in which some tensors are made in other pieces."""

from __future__ import annotations

from collections.abc import Iterable

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of, without_idle


def transfer_plan(plan: Plan, graph: TrainingGraph) -> Plan | None:
    """The runs of another problem's plan, as far as ``graph`` has such ops, each followed by those of its other ops
    that read what it made; None where that serves no schedule."""
    known = [r for r in runs_of(plan.schedule) if r in graph.op]
    shared = set(known)
    runs = _with_new(graph, shared, known)
    runs = without_idle(graph, runs, [r in shared for r in runs])
    try:
        return plan_from_runs(graph, runs, plan.strategy)
    except ProblemError:
        return None


def _with_new(graph: TrainingGraph, shared: set[str], runs: Iterable[str]) -> list[str]:
    """Runs with the new ops, each as soon as all is there that it reads."""
    readers: dict[str, list[str]] = {}
    for op in graph.ops:
        for t in op.reads if op.name not in shared else ():
            readers.setdefault(t, []).append(op.name)
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
            new = dict.fromkeys(r for t in graph.op[name].writes for r in readers.get(t, ()))
            waiting += [r for r in reversed(new) if made.issuperset(graph.op[r].reads) and r not in waiting]
    return found
