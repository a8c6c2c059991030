"""Search for plans with which a rank of a pipeline has a small peak.

A plan keeps K bytes between forward and backward, and has the peak T at all ops except the boundary. With a
boundary workspace w its peak is max(T, K + w).

Take two plans (K₁, T₁) and (K₂, T₂) with K₁ < K₂ and T₁ > T₂. With w = T₁ − K₂, a plan has a peak below T₁ exactly if
T < T₁ and K < K₂. So a search with this w looks for a plan between the two (Bowman 1976).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TypeVar

from rematplan.ir import TrainingGraph
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.pipeline.rank_candidates import RankCandidates
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.stage_plan import HeldBytes, StagePlan, TransientBytes
from rematplan.planner.strategies.store_all import no_recompute

HELD = ("kept", "deferred", "loose")
"""The fields of `HeldBytes` that a plan determines and that a rank's peak increases with. It increases with all of
`TransientBytes`."""
Group = TypeVar("Group", HeldBytes, TransientBytes)
REUSE = 3
"""The most searches for a plan with one workspace, if ops may write their results into operands."""
LeastPlan = Callable[[int, TrainingGraph, Sequence[Plan]], Plan | None]
"""Takes a stage's index, a problem of it and known plans. Returns the plan with the smallest peak that is found, or
None if there is no search any more."""


@dataclass(frozen=True)
class _Point:
    """A plan found. ``kept``, ``peak``: its K and T, inputs included, if ops write as the search assumed."""

    kept: int
    peak: int
    figures: StagePlan


@dataclass(frozen=True, eq=False)
class _Gap:
    """Two plans of a stage between which others may be. ``reusing``: whether ops are assumed to write into
    operands.
    """

    at: int
    """The stage's index among those of the rank."""
    reusing: bool
    low: _Point
    """The plan that keeps less."""
    high: _Point


def find_lean_plans(
    candidates: RankCandidates, least: LeastPlan, searches: int, budget: int, order: Sequence[int]
) -> int:
    """Return the smallest peak (bytes) of the rank that is found; plans found become candidates. After first searches
    for each stage, the search ends when the peak is within ``budget`` bytes, after ``searches`` more, or if no more can
    help. ``order``: the indices of the stages as they are searched."""
    gaps = []
    for reusing, at in product((False, True), order):
        stage = candidates.stages[at]
        if reusing and not stage.reusable:
            continue
        whole = no_recompute(stage.graph).estimate.peak - stage.graph.input_bytes
        high, low = (_found(candidates, least, at, reusing, workspace) for workspace in (0, whole))
        if high is not None and low is not None:
            gaps.append(_Gap(at, reusing, low, high))
    for _ in range(searches):
        best = candidates.peak(candidates.leanest())
        floors = {gap: _least_peak(candidates, gap) for gap in gaps if gap.low.kept < gap.high.kept}
        gap = min(floors, key=floors.__getitem__, default=None)
        # The budget only ends the search: with the peak found as its budget, it finds the same plans.
        if best <= budget or gap is None or floors[gap] >= best:
            return best
        gaps.remove(gap)
        low, high = gap.low, gap.high
        found = _found(candidates, least, gap.at, gap.reusing, low.peak - high.kept)
        if found is not None and found.kept < high.kept and found.peak < low.peak:
            gaps += [replace(gap, high=found), replace(gap, low=found)]
    return candidates.peak(candidates.leanest())


def _found(
    candidates: RankCandidates, least: LeastPlan, at: int, reusing: bool, workspace: int
) -> _Point | None:
    """Search for a plan of stage ``at`` with a small peak while the boundary op's workspace is ``workspace`` bytes, or
    its own if larger. Return the first plan found; None if ``least`` makes no search. Plans found become candidates.
    ``reusing``: whether ops are assumed to write into operands."""
    stage = candidates.stages[at]
    own = max(stage.graph.op[stage.boundary].workspace, workspace)
    real = replace(stage, graph=stage.with_boundary_workspace(own))
    ops = {*stage.reusable} if reusing else set()
    first: _Point | None = None
    # With ``reusing``, the first search assumes that ops write into operands; its plan is the result. If its
    # schedule does not free these operands, the next search assumes new tensors for the ops that need more.
    for _ in range(REUSE if reusing else 1):
        graph = real.assuming_reuse(ops).graph
        plan = least(at, graph, candidates.starts(at, graph))
        if plan is None:
            break
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
    return first


def _least_peak(candidates: RankCandidates, gap: _Gap) -> int:
    """Return an estimate of the rank's smallest peak with plans in a gap."""
    # The smaller of each figure: of the gap's two plans, and of all candidates of each other stage.
    ends = [gap.low.figures, gap.high.figures]
    known = [[c.figures for c in found] for found in candidates.found]
    return rank_peak(
        candidates.actions, [_smallest(ends if at == gap.at else own) for at, own in enumerate(known)]
    )


def _smallest(figures: Sequence[StagePlan]) -> StagePlan:
    held = _least([one.held for one in figures], HELD)
    transients = _least([one.transients for one in figures], [one.name for one in fields(TransientBytes)])
    return replace(figures[0], held=held, transients=transients)


def _least(groups: Sequence[Group], names: Iterable[str]) -> Group:
    """Return the first group, but with the smallest value of each field ``names`` that is stated in all groups."""
    least = {name: [getattr(one, name) for one in groups] for name in names}
    return replace(groups[0], **{name: min(values) for name, values in least.items() if None not in values})
