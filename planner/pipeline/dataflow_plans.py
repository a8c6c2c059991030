"""Plans for a stage of a dataflow pipeline, which gets its output back from the next stage in its backward (the
*answer*).

Of the first kind are plans that keep, between forward and backward, only what no inverse can recover from the answer;
for invertible stages that is nothing. Of the second kind is the plan that keeps only the input, and runs the stage's
forward again (Chen et al., «Training deep nets with sublinear memory cost», 2016).
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
"""The name of the strategy that the plans of this module carry."""


def starting_plans(
    problems: Sequence[StageProblem], actions: RankActions
) -> tuple[list[list[Plan]], list[int]]:
    """Return, for each stage of a rank, the plans that keep the fewest bytes for a micro-batch between forward and
    backward (`dataflow_plans`); and a list of these bytes, by stage.

    The list is a limit for all plans of the stages. It is empty, for no limit, if only one micro-batch is in flight
    at a time, because keeping less would save nothing.
    """
    starts = [dataflow_plans(one) for one in problems]
    if max(in_flight(actions).values()) == 1:
        return starts, []
    return starts, [one.measured(own[0]).kept_bytes for one, own in zip(problems, starts, strict=True)]


def dataflow_plans(problem: StageProblem) -> list[Plan]:
    """Return those candidate plans of a stage that keep the fewest bytes for a micro-batch between its forward and
    its backward. The stage recovers its input from its output.

    The candidates are the plans of `Reversible`, and the plan that keeps the input and runs the forward again.
    """
    found = list(_candidates(problem.graph, problem.boundary))
    kept = [problem.measured(plan).kept_bytes for plan in found]
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
    """Return the plan of a sequence of runs without useless ones. If a later run reads the next stage's message back,
    it is received right after the boundary."""
    answers = [inverse.name for inverse in graph.inverses if boundary in inverse.reads]
    backward_start = runs.index(boundary) + 1
    first: set[str] = set()
    stays = []
    every_run = [*runs[:backward_start], *answers, *runs[backward_start:]]
    for at, name in enumerate(every_run):
        stays.append(name not in first and not backward_start <= at < backward_start + len(answers))
        first.add(name)
    inverses = {inverse.name for inverse in graph.inverses}
    stays = [stay and name not in inverses for stay, name in zip(stays, every_run, strict=True)]
    return plan_from_runs(graph, without_idle(graph, every_run, stays), NAME)
