"""Search for plans with which a rank of a pipeline has a small peak.

Two figures of a stage's plan matter for this: K, the bytes that it keeps between forward and backward, and T, the
peak of a micro-batch at all ops but the boundary. The rank holds K once for each micro-batch in flight, and T once. If
the boundary op has a workspace of w bytes, a plan's peak is max(T, K + w). So with a large w the plan with the smallest
peak has a small K, and with a small w it has a small T.

Between two such plans, (K₁, T₁) and (K₂, T₂) with K₁ < K₂ and T₁ > T₂, there may be others with which the rank's peak
is smaller. If w = T₁ − K₂, both plans have the peak T₁, and exactly the plans with K < K₂ and T < T₁ have a smaller
one. So a search with this w finds such a plan, which divides the gap in two, or there is none (Bowman 1976: weighted
Chebyshev norms find all Pareto optima). The gap that could lower the rank's peak the most comes first. The search ends
when no gap could lower it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rematplan.ir import TrainingGraph
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.pipeline.actions import StagePlan
from rematplan.planner.pipeline.rank_candidates import RankCandidates
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.strategies.store_all import no_recompute

PEAKS = (
    "kept_bytes",
    "deferred_bytes",
    "transient_forward",
    "transient_backward",
    "transient_weight",
    "first_backward",
    "first_weight",
    "whole",
    "loose",
)
"""The fields of `StagePlan` that a plan determines and that a rank's peak increases with."""
REUSE = 3
"""The number of plans to search for with each workspace if ops may write their results into operands."""
LeastPlan = Callable[[TrainingGraph, Sequence[Plan]], Plan]
"""Takes a problem and known plans of it, and returns the plan with the smallest peak that is found."""


@dataclass(frozen=True)
class _Point:
    """A plan. ``kept``, ``peak``: its K and T with the inputs of the graph, if ops write as the search has assumed:
    into operands (`StageProblem.assuming_reuse`) or into new tensors. ``figures``: the stage's memory under the plan.
    """

    kept: int
    peak: int
    figures: StagePlan


@dataclass(frozen=True, eq=False)
class _Gap:
    """Two plans of a stage. ``at``: its index among the rank's stages. ``reusing``: whether ops are assumed to write
    their results into operands. ``low``: the plan that keeps less. ``high``: the one that keeps more."""

    at: int
    reusing: bool
    low: _Point
    high: _Point


def find_lean_plans(candidates: RankCandidates, least: LeastPlan, searches: int, budget: int) -> int:
    """Search for plans with which a rank's peak is within a budget or, if there are none, as small as possible. Return
    the smallest peak, in bytes. Plans found become candidates.

    The budget only ends the search, and has no other influence on it. So if a search finds a peak, the same search with
    this peak as the budget finds plans within it.
    """
    gaps = []
    for at, stage in enumerate(candidates.stages):
        whole = no_recompute(stage.graph).estimate.peak - stage.graph.input_bytes
        for reusing in (False, True) if stage.reusable else (False,):
            high, low = (_found(candidates, least, at, reusing, workspace) for workspace in (0, whole))
            gaps.append(_Gap(at, reusing, low, high))
    for _ in range(searches):
        best = candidates.peak(candidates.leanest())
        floors = {gap: _least_peak(candidates, gap) for gap in gaps if gap.low.kept < gap.high.kept}
        gap = min(floors, key=floors.__getitem__, default=None)
        if best <= budget or gap is None or floors[gap] >= best:
            return best
        gaps.remove(gap)
        low, high = gap.low, gap.high
        found = _found(candidates, least, gap.at, gap.reusing, low.peak - high.kept)
        if found.kept < high.kept and found.peak < low.peak:
            gaps += [replace(gap, high=found), replace(gap, low=found)]
    return candidates.peak(candidates.leanest())


def _found(candidates: RankCandidates, least: LeastPlan, at: int, reusing: bool, workspace: int) -> _Point:
    """Search for a plan if the boundary op has ``workspace`` bytes, or its own if that is more. Plans found become
    candidates.

    With ``reusing``, the first search assumes that ops write their results into operands wherever they can, and the
    result is its plan. If the plan needs more, because its schedule does not free these operands, the next search
    assumes that the ops which need more write new tensors.
    """
    stage = candidates.stages[at]
    own = max(stage.graph.op[stage.boundary].workspace, workspace)
    real = replace(stage, graph=stage.with_boundary_workspace(own))
    ops = {*stage.reusable} if reusing else set()
    first: _Point | None = None
    for _ in range(REUSE if reusing else 1):
        graph = real.assuming_reuse(ops).graph
        plan = least(graph, candidates.starts(at, graph))
        resident = [bytes_ - stage.most_reused for bytes_ in resident_bytes(graph, plan.schedule)]
        figures = candidates.take(at, plan)
        if first is None:
            boundary = plan.schedule.index(Run(stage.boundary))
            elsewhere = max(resident[:boundary] + resident[boundary + 1 :])
            first = _Point(resident[boundary] - own, elsewhere, figures)
        steps = zip(plan.schedule, real.resident(plan.schedule), strict=True)
        exceeding = {step.op for step, bytes_ in steps if isinstance(step, Run) and bytes_ > max(resident)}
        if ops.isdisjoint(exceeding):
            break
        ops -= exceeding
    assert first is not None
    return first


def _least_peak(candidates: RankCandidates, gap: _Gap) -> int:
    """Return an estimate of the smallest peak of the rank with plans in a gap: with the smaller of each figure of the
    gap's two plans, and of all candidates of each other stage."""
    ends = [gap.low.figures, gap.high.figures]
    known = [[c.figures for c in found] for found in candidates.found]
    return rank_peak(
        candidates.actions, [_smallest(ends if at == gap.at else own) for at, own in enumerate(known)]
    )


def _smallest(figures: Sequence[StagePlan]) -> StagePlan:
    least = {name: [getattr(one, name) for one in figures] for name in PEAKS}
    return replace(figures[0], **{name: min(values) for name, values in least.items() if None not in values})
