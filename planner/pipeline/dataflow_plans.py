"""Plans for a stage of a dataflow pipeline, in which the next stage's message in the backward (the *answer*)
returns the stage's output.

One kind keeps what inverses cannot recover from the answer; the other keeps the input and runs the forward
again (Chen et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of, without_idle
from rematplan.planner.pipeline.actions import RankActions
from rematplan.planner.pipeline.rank_memory import in_flight
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.reversible import Reversible

NAME = "dataflow"
"""The name of a strategy that is recorded in the plans of this module."""


def starting_plans(
    problems: Sequence[StageProblem], actions: RankActions
) -> tuple[list[list[Plan]], list[int]]:
    """Return, for each stage of a rank, its `dataflow_plans`, and as the second result the bytes that these
    plans keep.

    The second result is empty, which means no limit, if the rank has at most one micro-batch in flight in
    each stage.
    """
    starts = [dataflow_plans(one) for one in problems]
    # Then keeping fewer bytes saves no memory.
    if max(in_flight(actions).values()) == 1:
        return starts, []
    return starts, [one.measured(own[0]).held.kept for one, own in zip(problems, starts, strict=True)]


def dataflow_plans(problem: StageProblem) -> list[Plan]:
    """Return those candidate plans that keep the fewest bytes between the stage's forward and backward.

    The candidates are the plans of `Reversible`, and the plan that keeps the input and runs the forward
    again.
    """
    found = list(_candidates(problem.graph, problem.boundary))
    kept = [problem.measured(plan).held.kept for plan in found]
    return [plan for plan, bytes_ in zip(found, kept, strict=True) if bytes_ == min(kept)]


def _candidates(graph: TrainingGraph, boundary: str) -> Iterator[Plan]:
    once = {*graph.never_rerun}
    names = [op.name for op in graph.ops]
    backward_start = names.index(boundary) + 1
    again = [name for name in names[:backward_start] if name not in once]
    yield _plan(graph, boundary, [*names[:backward_start], *again, *names[backward_start:]])
    for plan in Reversible().family(graph):
        yield _plan(graph, boundary, runs_of(plan.schedule))


def _plan(graph: TrainingGraph, boundary: str, runs: Sequence[str]) -> Plan:
    """Return the plan of ``runs`` with the inverses that read ``boundary`` (the next stage's answer) inserted right
    after ``boundary``. Inverses and repeated runs whose results nothing reads are left out."""
    answers = [inverse.name for inverse in graph.inverses if boundary in inverse.reads]
    backward_start = runs.index(boundary) + 1
    first: set[str] = set()
    stays = []
    # The answer recovers the stage's output right after the boundary.
    every_run = [*runs[:backward_start], *answers, *runs[backward_start:]]
    for at, name in enumerate(every_run):
        stays.append(name not in first and not backward_start <= at < backward_start + len(answers))
        first.add(name)
    inverses = {inverse.name for inverse in graph.inverses}
    stays = [stay and name not in inverses for stay, name in zip(stays, every_run, strict=True)]
    return plan_from_runs(graph, without_idle(graph, every_run, stays), NAME)
