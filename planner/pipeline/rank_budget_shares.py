"""The bytes of a rank's budget that are left for one stage's plan, if limits are known for what other stages
and micro-batches keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.planner.pipeline.actions import RankActions
from rematplan.planner.pipeline.rank_memory import rank_bytes
from rematplan.planner.pipeline.stage_plan import StagePlan, TransientBytes
from rematplan.planner.pipeline.stage_problem import StageProblem

Bounds = tuple[int, int]
"""Limits in bytes of what a stage keeps for a micro-batch: between forward and backward, and between I and W."""


@dataclass(frozen=True)
class RankBudgetShares:
    """Computes how many bytes of a rank's budget are left for the plan of each of its stages."""

    stages: tuple[StageProblem, ...]
    actions: RankActions
    """The rank's actions, in order."""
    all: tuple[StagePlan, ...]
    """The memory and times of each stage without recomputation."""

    def bounds(self, share: float) -> list[Bounds]:
        """Return, for each stage, the most bytes that it may keep per micro-batch: from forward to backward,
        and from I to W.

        ``share``: from 0 (the least that any plan keeps) to 1 (as without recomputation).
        """
        found = []
        for stage, most in zip(self.stages, self.all, strict=True):
            span = max(0, most.held.kept - stage.least_kept)
            kept = stage.least_kept + int(share * span)
            # What is not kept before the backward need not be kept from I to W. Gradients that I passes to W
            # cannot be recomputed.
            found.append((kept, max(kept, most.held.deferred - span + int(share * span))))
        return found

    def stage_budget(self, at: int, budget: int, bounds: Sequence[Bounds], relaxed: bool = False) -> int:
        """Return the bytes, inputs included, that other micro-batches and stages leave to the plan of the rank's stage
        number ``at`` if all keep within ``bounds``. They may be negative.

        With ``relaxed``, return an upper bound: a larger peak exceeds the rank's budget if no stage keeps less than its
        ``bounds``.
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
    """Return a stage's memory without its running action, if a micro-batch keeps ``kept`` and ``deferred`` bytes.
    ``created``: whether to count the most that the stage can hold, with ``freed`` bytes of sent outputs, or the
    least."""
    held = replace(
        most.held,
        kept=kept,
        deferred=deferred,
        deferred_input=0 if created else most.messages.received,
        loose=freed if created else 0,
    )
    firsts = (held.new_gradients({part}) if created else 0 for part in "IW")
    return replace(most, held=held, transients=TransientBytes(0, 0, 0, 0, *firsts))
