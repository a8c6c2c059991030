"""The part of a rank's budget that each stage can use, given limits on what the others keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.planner.pipeline.actions import RankActions, StagePlan
from rematplan.planner.pipeline.rank_memory import rank_bytes
from rematplan.planner.pipeline.stage_problem import StageProblem

Bounds = tuple[int, int]
"""Limits in bytes of what a stage keeps for a micro-batch: between forward and backward, and between I and W."""


@dataclass(frozen=True)
class RankRoom:
    """What is needed to divide a rank's budget among its stages.

    ``stages``: the planning problem of each stage. ``actions``: the rank's actions in order. ``all``: the memory and
    times of each stage under its plan without recomputation.
    """

    stages: tuple[StageProblem, ...]
    actions: RankActions
    all: tuple[StagePlan, ...]

    def bounds(self, share: float) -> list[Bounds]:
        """Return limits, in bytes, of what each stage keeps for a micro-batch, as pairs: between forward and
        backward, and between the two parts of a split backward (I and W).

        The first limit is the least that the stage can keep, plus ``share`` (0 to 1) of the difference to what it
        keeps without recomputation. The second is ``share`` of what the stage holds between I and W without
        recomputation, but no less than the first.
        """
        found = []
        for stage, most in zip(self.stages, self.all, strict=True):
            kept = stage.least_kept + int(share * max(0, most.kept_bytes - stage.least_kept))
            found.append((kept, max(kept, int(share * most.deferred_bytes))))
        return found

    def share(self, kept: Sequence[int]) -> float:
        """Return the smallest share (0 to 1) at which the limits that `bounds` returns allow the bytes ``kept``; 1 if
        none does.

        ``kept``: for each stage, bytes that it keeps for a micro-batch between forward and backward.
        """
        spans = (m.kept_bytes - s.least_kept for s, m in zip(self.stages, self.all, strict=True))
        shares = (
            (k - s.least_kept) / span if span > 0 else 0.0
            for k, s, span in zip(kept, self.stages, spans, strict=True)
        )
        return min(1.0, max(0.0, *shares, 0.0))

    def room(self, at: int, budget: int, bounds: Sequence[Bounds], relaxed: bool = False) -> int:
        """Return the bytes that are left for the plan of a stage's graph, inputs included, given what the rank holds
        for other micro-batches and stages.

        By default, every plan within these bytes and the stage's limits fits the rank, as long as the other stages
        keep their limits: it is assumed that the gradients of a step's first backward are created while everything
        else is held. With ``relaxed``, the result is an upper bound: every plan that fits the rank is within it, as
        long as the other stages keep no less than their limits.

        Args:
            at: the index of the stage among the rank's stages.
            budget: bytes that the rank may hold.
            bounds: for each stage, the limits of what it keeps for a micro-batch; see `bounds`.
            relaxed: whether to return the upper bound.
        """
        me = self.all[at].stage
        idle = [
            _idle(most, kept, deferred, 0 if relaxed else most.gradients)
            for most, (kept, deferred) in zip(self.all, bounds, strict=True)
        ]
        stage = self.stages[at]
        saved, passed = stage.bytes(stage.per_microbatch), stage.bytes(stage.tangents)
        own = {"F": saved, "B": saved + passed, "I": saved + passed, "W": saved}
        left: dict[str, int] = {}
        for action, others in zip(self.actions, rank_bytes(self.actions, idle), strict=False):
            if action.stage == me:
                rest = budget - others - own[action.kind]
                left[action.kind] = min(rest, left.get(action.kind, rest))
        return stage.graph.input_bytes + (max if relaxed else min)(left.values())


def _idle(most: StagePlan, kept: int, deferred: int, gradients: int) -> StagePlan:
    """Return the figures of a stage that holds ``kept`` bytes between forward and backward, ``deferred`` bytes
    between I and W, and nothing more during an action except ``gradients`` bytes in its first backward."""
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
