"""What the ranks of a pipeline do, and what each stage holds and takes. Plain data.

A micro-batch's way through a stage is ``F`` and ``B``, or ``F``, ``I`` and ``W``. A ``B`` does what ``I`` and ``W`` do,
one right after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from rematplan.ir import ProblemError

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; the part of a backward that gives the input's gradient; the rest of it, which gives those of the
weights."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing that a rank does: a kind of work of one stage for one micro-batch, both counted from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


RankActions: TypeAlias = tuple[Action, ...]
"""What one rank does, in its order."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which each rank works.

    ``name``: of the schedule. ``actions``: of each rank. ``stage_of_rank``: the stages of each rank, ascending.

    Raises:
        ProblemError: a rank works for a stage that it does not have, or a micro-batch goes through a stage otherwise
            than by F and B, or F, I and W, in this order.
    """

    name: str
    stages: int
    ranks: int
    microbatches: int
    actions: tuple[RankActions, ...]
    stage_of_rank: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.actions) == len(self.stage_of_rank) == self.ranks:
            raise ProblemError(
                f"schedule {self.name!r} has {self.ranks} ranks, but not as many lists of actions"
            )
        if sorted(s for stages in self.stage_of_rank for s in stages) != list(range(self.stages)):
            raise ProblemError(f"schedule {self.name!r}: not each of its {self.stages} stages has one rank")
        for rank, (actions, stages) in enumerate(zip(self.actions, self.stage_of_rank, strict=True)):
            self._check(rank, actions, stages)

    def _check(self, rank: int, actions: RankActions, stages: tuple[int, ...]) -> None:
        kinds: dict[tuple[int, int], str] = {}
        for a in actions:
            kinds[a.stage, a.microbatch] = kinds.get((a.stage, a.microbatch), "") + a.kind
        wanted = {(s, m) for s in stages for m in range(self.microbatches)}
        for key in sorted(wanted ^ kinds.keys()):
            raise ProblemError(
                f"schedule {self.name!r}, rank {rank}: stage {key[0]}, micro-batch {key[1]} is "
                f"{'missing' if key in wanted else 'not one of its own'}"
            )
        for (stage, m), order in sorted(kinds.items()):
            if order not in ("F", "FB", "FIW"):
                raise ProblemError(
                    f"schedule {self.name!r}, rank {rank}: stage {stage} does {order} for micro-batch {m}; it must be "
                    f"FB or FIW"
                )

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return next(rank for rank, stages in enumerate(self.stage_of_rank) if stage in stages)


def schedule_of_rows(
    name: str, stages: int, microbatches: int, rows: Sequence[Sequence[tuple[str, int, int]]]
) -> PipelineSchedule:
    """The schedule of each rank's rows ``(kind, stage, microbatch)``; which stages a rank has is read off them.

    Raises:
        ProblemError: see `PipelineSchedule`; or an unknown kind.
    """
    for kind in sorted({row[0] for rank in rows for row in rank}):
        if kind not in KINDS:
            raise ProblemError(
                f"schedule {name!r}: unknown kind of action {kind!r}; known: {', '.join(KINDS)}"
            )
    actions = tuple(tuple(Action(cast(Kind, kind), s, m) for kind, s, m in rank) for rank in rows)
    held = tuple(tuple(sorted({a.stage for a in rank})) for rank in actions)
    return PipelineSchedule(name, stages, len(actions), microbatches, actions, held)


@dataclass(frozen=True)
class StagePlan:
    """What a stage holds and takes under its plan; bytes and microseconds, of one micro-batch.

    A *transient* is the largest number of bytes that an action has for its micro-batch at any moment, beyond what the
    rank holds for other micro-batches and for good; what it takes over from an earlier action is included. So the first
    forward of a rank with one stage has its peak at ``states`` + ``torch_bytes`` + ``transient_forward``.

    ``kept_bytes`` (K): held between the stage's forward and backward. ``deferred_bytes``: held between I and W.
    ``transient_backward``: of an I; a B has the larger of this and ``transient_weight`` + ``whole``, as it does both
    and torch still holds outputs and the input's gradient during its second part. A stage that is never split has
    ``transient_weight``, ``deferred_bytes``, ``whole`` and ``weight`` 0. ``first_backward``, ``first_weight``: the same
    of the first backward and weight action of a step, which makes the gradients to which later ones add; those
    gradients, ``gradients`` bytes, are there from the end of the first W or B on.

    ``states``: parameters, buffers, optimizer states, and what else is there during the whole step, but for
    ``torch_bytes``, what torch or the channels hold during the whole step: buffers to receive into. ``left``: bytes
    that each B or I leaves until the end of the step: outputs that are returned, tensors whose sending is waited for
    only then. ``pending``: bytes that each B or I leaves until the next one has ended: a message of which there is one
    at a time. ``closing``: bytes that the end of the step takes beyond what is left then: the outputs joined.

    ``forward``, ``backward``, ``weight``: time of an F, of an I (of a whole B without ``weight``), of a W.
    ``extra``: time spent in recomputation, included in those. ``plan``: the plan as JSON data, or None if not planned.
    """

    stage: int
    kept_bytes: int
    transient_forward: int
    transient_backward: int
    transient_weight: int = 0
    states: int = 0
    torch_bytes: int = 0
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    extra: float = 0.0
    plan: Mapping[str, Any] | None = None
    deferred_bytes: int = 0
    whole: int = 0
    gradients: int = 0
    first_backward: int | None = None
    first_weight: int | None = None
    left: int = 0
    pending: int = 0
    closing: int = 0

    def microseconds(self, kind: Kind) -> float:
        """The time of an action."""
        return {
            "F": self.forward,
            "I": self.backward,
            "W": self.weight,
            "B": self.backward + self.weight,
        }[kind]


def stages_by_number(plans: Iterable[StagePlan]) -> dict[int, StagePlan]:
    """Plans by their stage.

    Raises:
        ProblemError: two of one stage.
    """
    found: dict[int, StagePlan] = {}
    for plan in plans:
        if plan.stage in found:
            raise ProblemError(f"two plans are of stage {plan.stage}")
        found[plan.stage] = plan
    return found
