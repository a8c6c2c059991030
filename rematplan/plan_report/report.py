"""`Report`: the page about a plan as an object that notebooks show."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rematplan.ir import TrainingGraph
from rematplan.ir.files import write_whole
from rematplan.plan_report.page import Subject, page
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.plans.tradeoff import trace_curves
from rematplan.runtime.graph.captured_step import Call

MANY = 3000
"""From this number of ops on, the trade-off has no other plans: they would take most of the page's time."""
HEIGHT = 900
"""Pixels of the page in a notebook."""


@dataclass(frozen=True)
class Report:
    """A page about a plan: memory over the step, the trade-off, what is recomputed, and what bounds the peak."""

    html: str
    """The whole page. It needs no network."""

    def save(self, path: str | Path) -> None:
        """Write the page to a file.

        Raises:
            ProblemError: the file cannot be written.
        """
        write_whole(path, self.html)

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        return f'<iframe srcdoc="{html.escape(self.html)}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'


def subject_of(graph: TrainingGraph, plan: Plan, calls: Iterable[Call]) -> Subject:
    """Return what a report is about. ``calls``: those of the captured step and its inverses, if there is one."""
    calls = tuple(calls)
    modules = {call.name: call.module for call in calls}
    return Subject(graph, plan, modules, {call.name: str(call.target) for call in calls})


def report(subject: Subject, progress: Progress = silent) -> Report:
    """Return the page about a plan, with the plans of a fast strategy down to its peak if the problem has fewer than
    `MANY` ops. `UsageError` without the package plotly."""
    fast = {ApproxDP.name: ApproxDP()} if len(subject.graph.ops) < MANY else {}
    curves, _ = trace_curves(subject.graph, fast, [subject.plan.peak], progress)
    others = tuple(p for plans in curves.values() for p in plans)
    return Report(page(replace(subject, curve=others)))
