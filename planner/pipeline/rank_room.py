"""What the stages of a rank leave each other of its budget, by bounds on what each keeps for a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.planner.pipeline.actions import RankActions, StagePlan
from rematplan.planner.pipeline.rank_memory import rank_bytes
from rematplan.planner.pipeline.stage_problem import StageProblem

Bounds = tuple[int, int]
"""Bytes that a stage may keep for a micro-batch between forward and backward, and between I and W."""


@dataclass(frozen=True)
class RankRoom:
    """The stages of a rank, its actions, and the figures of each stage when it keeps all."""

    stages: tuple[StageProblem, ...]
    actions: RankActions
    all: tuple[StagePlan, ...]

    def bounds(self, share: float) -> list[Bounds]:
        """Of each stage, at a share of the way from the least that it can keep to all."""
        found = []
        for stage, most in zip(self.stages, self.all, strict=True):
            kept = stage.least_kept + int(share * max(0, most.kept_bytes - stage.least_kept))
            found.append((kept, max(kept, int(share * most.deferred_bytes))))
        return found

    def share(self, kept: Sequence[int]) -> float:
        """The largest share at which a stage keeps so many bytes."""
        spans = (m.kept_bytes - s.least_kept for s, m in zip(self.stages, self.all, strict=True))
        shares = (
            (k - s.least_kept) / span if span > 0 else 0.0
            for k, s, span in zip(kept, self.stages, spans, strict=True)
        )
        return min(1.0, max(0.0, *shares, 0.0))

    def room(self, at: int, budget: int, bounds: Sequence[Bounds], relaxed: bool = False) -> int:
        """The budget of a stage's graph, its inputs included, beside what the rank holds for other micro-batches.

        By default each plan that is within it and the stage's bounds fits, if the others keep their bounds: a first
        backward is charged the gradients that it makes beside all that it holds. ``relaxed``: each plan that fits is
        within it, if the others keep no less than their bounds.
        """
        me = self.all[at].stage
        idle = [
            _idle(most, kept, deferred, 0 if relaxed else most.gradients)
            for most, (kept, deferred) in zip(self.all, bounds, strict=True)
        ]
        stage = self.stages[at]
        held, given = stage.bytes(stage.held), stage.bytes(stage.given)
        own = {"F": held, "B": held + given, "I": held + given, "W": held}
        left: dict[str, int] = {}
        for action, others in zip(self.actions, rank_bytes(self.actions, idle), strict=False):
            if action.stage == me:
                rest = budget - others - own[action.kind]
                left[action.kind] = min(rest, left.get(action.kind, rest))
        return stage.graph.input_bytes + (max if relaxed else min)(left.values())


def _idle(most: StagePlan, kept: int, deferred: int, gradients: int) -> StagePlan:
    """A stage that holds so much from action to action, and nothing more while one runs."""
    return replace(
        most,
        kept_bytes=kept,
        deferred_bytes=deferred,
        transient_forward=0,
        transient_backward=0,
        transient_weight=0,
        whole=0,
        first_backward=gradients,
        first_weight=gradients,
    )
