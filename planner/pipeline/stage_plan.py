"""The memory (bytes) and times (microseconds) of a pipeline stage under a plan, for one micro-batch, as plain data.

F, B, I and W are the actions of a micro-batch in a stage: see `Kind`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from rematplan.ir import ProblemError
from rematplan.planner.pipeline.actions import Kind


@dataclass(frozen=True)
class HeldBytes:
    """The bytes that a stage holds after an action for later ones. Messages are not included, except in ``kept``."""

    kept: int = 0
    """K: kept from F to B or I."""
    deferred: int = 0
    """D: kept from I to W; 0 if the backward is not split."""
    deferred_input: int = 0
    """The part of D that is the message from the previous stage, if W reads this message."""
    loose: int = 0
    """A message to the next stage before its micro-batch's backward, if ``kept`` does not include it."""
    gradients: int = 0
    """The parameters' gradients, which exist from the first backward to the end of the step."""
    early_gradients: int = 0
    """The part of ``gradients`` that an I computes, because one op computes it together with the input's gradient."""

    def taken_over(self, kind: Kind) -> int:
        """Return what an earlier action kept for an action's micro-batch; the action's transient includes it."""
        return {"F": 0, "B": self.kept, "I": self.kept, "W": self.deferred}[kind]

    def handed_on(self, kind: Kind) -> int:
        """Return what an action keeps for later actions of its micro-batch."""
        return {"F": self.kept, "B": 0, "I": self.deferred, "W": 0}[kind]

    def new_gradients(self, parts: Set[str]) -> int:
        """Return the gradients that exist from an action on. ``parts``: those (I, W) that it does first in a step."""
        late = self.gradients - self.early_gradients
        return self.early_gradients * ("I" in parts) + late * ("W" in parts)


@dataclass(frozen=True)
class TransientBytes:
    """The *transient* of an action: the most bytes that its micro-batch needs during it.

    It includes what was kept for it, and excludes `StandingBytes.always`.
    """

    forward: int = 0
    """The transient of F."""
    backward: int = 0
    """The transient of I. That of a B is the larger of this and ``weight`` + ``whole`` + new
    `HeldBytes.early_gradients`."""
    weight: int = 0
    """The transient of W; 0 if the backward is not split."""
    whole: int = 0
    """What the work of W needs in addition in a B: torch keeps outputs and their gradients to the end of a B,
    but frees them after an I.
    """
    first_backward: int | None = None
    """What replaces ``backward`` in the first B or I of a step; None: nothing does."""
    first_weight: int | None = None
    """What replaces ``weight`` in the first B or W of a step, without the early gradients; None: nothing does."""

    @property
    def most(self) -> int:
        """The largest transient after the step's first actions."""
        return max(self.forward, self.backward, self.weight)

    def during(self, kind: Kind, parts: Set[str], early: int) -> int:
        """Return the transient of an action. ``parts``: the parts of the backward (I, W) that this action is the first
        in the step to do. ``early``: new gradients of its I."""
        first_backward = self.first_backward if "I" in parts else None
        first_weight = self.first_weight if "W" in parts else None
        backward = self.backward if first_backward is None else first_backward
        weight = self.weight if first_weight is None else first_weight
        whole = max(backward, weight + self.whole + early)
        return {"F": self.forward, "B": whole, "I": backward, "W": weight}[kind]


@dataclass(frozen=True)
class MessageBytes:
    """A stage's messages for one micro-batch. As a part of a `StagePlan`, ``sent`` and ``returned`` are 0 if the
    stage that receives the message counts it.
    """

    received: int = 0
    """The message from the previous stage, while it waits. During the action that reads it, it is in the transient."""
    answered: int = 0
    """The message from the next stage, while it waits."""
    sent: int = 0
    """The message to the next stage. In a `StagePlan` it counts after its micro-batch's backward."""
    returned: int = 0
    """The message to the previous stage."""
    credits: int = 0
    """How many messages a channel receives ahead in each direction; 0 without channels."""

    def arriving(self, kind: str) -> int:
        """Return the bytes of the message that a forward (F) or a backward (B) reads."""
        return {"F": self.received, "B": self.answered}[kind]


@dataclass(frozen=True)
class StandingBytes:
    """The bytes that a stage holds in addition to its micro-batches in flight."""

    states: int = 0
    """Parameters, buffers, optimizer states and whatever else exists during the whole step, except
    ``torch_bytes``.
    """
    torch_bytes: int = 0
    """Buffers from which a channel sends, and inputs and outputs of all micro-batches, outputs in ``left``
    excluded.
    """
    left: int = 0
    """What each B or I leaves until the end of the step: returned outputs and the loss."""
    opening: int = 0
    """Bytes in addition while torch prepares the step. A rank counts the largest ``opening`` of its stages."""
    closing: int = 0
    """Bytes in addition while torch joins the outputs of all micro-batches, after all actions."""
    ending: int = 0
    """Bytes in addition after the last action, while torch scales or reduces gradients. A rank counts the largest
    ``ending`` of its stages.
    """

    @property
    def always(self) -> int:
        """What exists during the whole step."""
        return self.states + self.torch_bytes


@dataclass(frozen=True)
class ActionTimes:
    """The microseconds of a stage's actions, recomputation included."""

    forward: float = 0.0
    """The time of F."""
    backward: float = 0.0
    """The time of I, or of B if ``weight`` is 0."""
    weight: float = 0.0
    """The time of W."""
    extra: float = 0.0
    """The time of recomputation, which the other three include."""

    @property
    def total(self) -> float:
        """The microseconds of a stage's forward and whole backward."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class StagePlan:
    """The memory and times of a stage under a plan, for one micro-batch."""

    stage: int
    """The stage's number, from 0."""
    held: HeldBytes = HeldBytes()
    transients: TransientBytes = TransientBytes()
    messages: MessageBytes = MessageBytes()
    standing: StandingBytes = StandingBytes()
    times: ActionTimes = ActionTimes()
    plan: Mapping[str, Any] | None = None
    """The plan as JSON data; None if there is none."""

    def adding(self, **standing: int) -> StagePlan:
        """Return this with more bytes in fields of ``standing``."""
        more = {name: getattr(self.standing, name) + bytes_ for name, bytes_ in standing.items()}
        return replace(self, standing=replace(self.standing, **more))


def stages_by_number(plans: Iterable[StagePlan]) -> dict[int, StagePlan]:
    """Return the stage plans by the number of the stage (`StagePlan.stage`); `ProblemError` if two have the same."""
    found: dict[int, StagePlan] = {}
    for plan in plans:
        if plan.stage in found:
            raise ProblemError(f"two plans are of stage {plan.stage}")
        found[plan.stage] = plan
    return found
