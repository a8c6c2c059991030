"""Divide the budget of a pipeline's rank among its stages: the bytes that are left for one stage's plan, if limits are
known for what the other stages and micro-batches keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.planner.pipeline.actions import RankActions, StagePlan
from rematplan.planner.pipeline.rank_memory import rank_bytes
from rematplan.planner.pipeline.stage_problem import StageProblem

Bounds = tuple[int, int]
"""Limits in bytes of what a stage keeps for a micro-batch: between forward and backward, and between I and W."""


@dataclass(frozen=True)
class RankBudgetShares:
    """Divides the budget of a pipeline's rank among its stages: computes how many bytes are left for the plan of each.

    ``stages``: the planning problem of each stage. ``actions``: the rank's actions in order. ``all``: the memory and
    times of each stage under its plan without recomputation.
    """

    stages: tuple[StageProblem, ...]
    actions: RankActions
    all: tuple[StagePlan, ...]

    def bounds(self, share: float) -> list[Bounds]:
        """Return, for each stage, two limits of the bytes that it may keep for a micro-batch: between forward and
        backward, and between the two parts of a split backward (I and W).

        ``share``: 0 to 1. The first limit is the least that any plan keeps, plus ``share`` of the difference to the
        plan without recomputation. The second limit is what the plan without recomputation keeps between I and W,
        minus the same number of bytes, but at least the first limit: tensors that the stage does not keep before the
        backward need not be kept during it, while gradients that an I passes to its W cannot be computed again.
        """
        found = []
        for stage, most in zip(self.stages, self.all, strict=True):
            span = max(0, most.kept_bytes - stage.least_kept)
            kept = stage.least_kept + int(share * span)
            found.append((kept, max(kept, most.deferred_bytes - span + int(share * span))))
        return found

    def stage_budget(self, at: int, budget: int, bounds: Sequence[Bounds], relaxed: bool = False) -> int:
        """Return a budget for the plan of one stage's graph, inputs included: the bytes of the rank's budget that are
        not used for other micro-batches and other stages.

        By default the result is safe. If the plan's peak is within it, and no stage keeps more than its ``bounds``, the
        rank stays within its budget during its actions. The gradients of a step's first backward are assumed to be
        allocated at its worst moment. With ``relaxed`` the result is an upper bound: if no stage keeps less than its
        ``bounds``, a plan with a larger peak exceeds the rank's budget.
        """
        me = self.all[at].stage
        idle = [
            _idle(most, *bound, stage.bytes(stage.freed), created=not relaxed)
            for most, bound, stage in zip(self.all, bounds, self.stages, strict=True)
        ]
        stage = self.stages[at]
        saved = stage.bytes(stage.per_microbatch)
        passed = 0 if relaxed and stage.tangents_held else stage.bytes(stage.tangents)
        forward = 0 if relaxed else stage.loss_forward  # beyond the workspace of the graph's boundary op
        # What the next stage holds, and what torch frees, is in the graph, but is not counted after the forward.
        kept = saved - (stage.bytes((*stage.handed, *stage.freed)) if relaxed else 0)
        unread = saved - stage.bytes(stage.late_inputs) if relaxed else 0  # by some W
        own = {"F": saved + forward, "B": kept + passed, "I": kept + passed, "W": kept - unread}
        left: dict[str, int] = {}
        for action, (_, others) in zip(self.actions, rank_bytes(self.actions, idle), strict=False):
            if action.stage == me:
                rest = budget - others - own[action.kind]
                left[action.kind] = min(rest, left.get(action.kind, rest))
        return stage.graph.input_bytes + (max if relaxed else min)(left.values())


def _idle(most: StagePlan, kept: int, deferred: int, freed: int, created: bool) -> StagePlan:
    """Return the memory of a stage without that of its running action, so that `rank_bytes` yields only what the rank
    holds for other micro-batches and stages.

    ``most``: the stage's memory and times without recomputation. ``kept``: bytes kept between forward and backward.
    ``deferred``: bytes kept between I and W. ``freed``: bytes of outputs that torch frees once they are sent.
    ``created``: whether to count the most that the stage can hold, too: the gradients that its first backward
    allocates, during that backward, all of ``freed`` in addition to ``kept`` until they are freed, and the message from
    the previous stage in addition to ``deferred``.
    """
    return replace(
        most,
        loose=freed if created else 0,
        kept_bytes=kept,
        deferred_bytes=deferred,
        deferred_input=0 if created else most.received,
        transient_forward=0,
        transient_backward=0,
        transient_weight=0,
        whole=0,
        first_backward=most.early_gradients if created else 0,
        first_weight=most.gradients - most.early_gradients if created else 0,
    )
