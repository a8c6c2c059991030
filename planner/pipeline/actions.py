"""The actions of a pipeline's ranks in order, and the memory and times of its stages, as plain data.

A micro-batch passes a stage as F (forward) and B (backward), or as F, I (the input's gradient) and W (the
weights' gradients).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from rematplan.ir import ProblemError

Kind = Literal["F", "B", "I", "W"]
"""The kind of an action.

F: forward. B: backward. I: the part of a backward that computes the input's gradient. W: the rest of it, which
computes the gradients of the weights.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)
RECEIVES = {"RECV_F": "F", "RECV_B": "B"}
"""The kinds of entries in a rank's row in which the rank begins to receive a message, and the kind of the message: from
the previous stage for a forward (F), or from the next stage for a backward (B)."""
SENDS = {"SEND_F": "F", "SEND_B": "B"}
"""The kinds of entries in a rank's row in which the rank begins to send a message, and the kind of the action that made
the message: forward (F, an output for the next stage) or backward (B, a gradient for the previous stage)."""
KEEPS = ("KEEP_B", "FORGET_B")
"""The kinds of entries in a rank's row that begin and end a time in which a gradient that was received still exists
after the action that has read it."""
DROPS = {"DROP_F": "F", "DROP_B": "B"}
"""The kinds of entries in a rank's row in which the rank frees a message that it has sent, and the kind of the action
that made the message: forward (F, an output) or backward (B, a gradient of an input)."""
Entry: TypeAlias = tuple[str, int, int]
"""An entry in a rank's row that is no action: its kind (`RECEIVES`, `SENDS`, `KEEPS`, `DROPS`), the stage that receives
or sends the message, the micro-batch."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action of a rank: work on one micro-batch in one stage. Comparisons read the kind, the stage and
    the micro-batch.
    """

    kind: Kind
    stage: int
    """Counted from 0, as micro-batches are."""
    microbatch: int
    messages: tuple[Entry, ...] = field(default=(), compare=False)
    """Messages that the rank begins to receive or send, and sent ones that it frees, between its previous
    action and this one, in order.
    """
    after: tuple[Entry, ...] = field(default=(), compare=False)
    """The same after this action, if it is the rank's last one."""
    before: int = field(default=0, compare=False)
    """Bytes that the rank holds outside of its stages after its previous action."""
    during: int = field(default=0, compare=False)
    """The same during this action."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


RankActions: TypeAlias = tuple[Action, ...]
"""The actions of one rank, in order."""
Message: TypeAlias = tuple[str, int, int]
"""A message between stages, identified by its direction (``F``: forward; ``B``: backward), the stage that sends it, and
the micro-batch."""
Step: TypeAlias = Action | Message
"""A step of a rank: it runs an action, or begins to send a message that an earlier action has made."""


def made_by(action: Action) -> Message | None:
    """Return the message that an action makes, for the next stage (F) or the previous one (B or I); None for a W."""
    if action.kind == "W":
        return None
    return "F" if action.kind == "F" else "B", action.stage, action.microbatch


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which each rank of a pipeline runs its actions.

    Raises a ProblemError if a stage has not exactly one rank, or a micro-batch does not pass each stage as F,
    F B, or F I W.
    """

    name: str
    stages: int
    ranks: int
    microbatches: int
    actions: tuple[RankActions, ...]
    """For each rank, its actions in order."""
    stage_of_rank: tuple[tuple[int, ...], ...]
    """For each rank, the numbers of its stages, ascending."""

    def __post_init__(self) -> None:
        if not len(self.actions) == len(self.stage_of_rank) == self.ranks:
            raise ProblemError(
                f"schedule {self.name!r} needs a list of actions for each of its {self.ranks} ranks"
            )
        numbers = sorted(s for stages in self.stage_of_rank for s in stages)
        if len(numbers) != self.stages or numbers != list(range(self.stages)):
            raise ProblemError(
                f"schedule {self.name!r}: each of its {self.stages} stages must have exactly one rank"
            )
        for rank, (actions, stages) in enumerate(zip(self.actions, self.stage_of_rank, strict=True)):
            self._check(rank, actions, stages)

    def _check(self, rank: int, actions: RankActions, stages: tuple[int, ...]) -> None:
        kinds: dict[tuple[int, int], str] = {}
        for a in actions:
            kinds[a.stage, a.microbatch] = kinds.get((a.stage, a.microbatch), "") + a.kind
        every = (
            (s, m) for s in stages for m in range(self.microbatches)
        )  # read up to the first that is missing
        missing = next((key for key in every if key not in kinds), None)
        other = min(
            (k for k in kinds if not (k[0] in stages and 0 <= k[1] < self.microbatches)), default=None
        )
        for key, problem in ((missing, "missing"), (other, "not one of this rank")):
            if key is not None:
                raise ProblemError(
                    f"schedule {self.name!r}, rank {rank}: stage {key[0]}, micro-batch {key[1]} is {problem}"
                )
        for (stage, m), order in sorted(kinds.items()):
            if order not in ("F", "FB", "FIW"):
                raise ProblemError(
                    f"schedule {self.name!r}, rank {rank}: stage {stage} does {order} for micro-batch {m}; it must be "
                    f"FB or FIW"
                )

    @cached_property
    def steps(self) -> tuple[tuple[Step, ...], ...]:
        """For each rank, its actions in order and between them the messages that it sends."""
        return tuple(map(_steps, self.actions))

    def rank_of(self, stage: int) -> int:
        """Return the number of the rank that runs a stage."""
        return next(rank for rank, stages in enumerate(self.stage_of_rank) if stage in stages)


def schedule_of_rows(
    name: str, stages: int, microbatches: int, rows: Sequence[Sequence[tuple[str, int, int]]]
) -> PipelineSchedule:
    """Return the schedule in which each rank runs one row: (kind, stage, micro-batch) of actions and of
    entries between them.

    A send without an entry begins right after the action that makes the message.
    """
    for kind in sorted({row[0] for rank in rows for row in rank}):
        if kind not in (*KINDS, *RECEIVES, *SENDS, *KEEPS, *DROPS):
            raise ProblemError(
                f"schedule {name!r}: unknown kind of action {kind!r}; known: {', '.join(KINDS)}"
            )
    actions = tuple(tuple(_actions(rank)) for rank in rows)
    stages_of = tuple(tuple(sorted({a.stage for a in rank})) for rank in actions)
    return PipelineSchedule(name, stages, len(actions), microbatches, actions, stages_of)


def _actions(row: Iterable[tuple[str, int, int]]) -> Iterator[Action]:
    entries = list(row)
    last = max((at for at, (kind, _, _) in enumerate(entries) if kind in KINDS), default=0)
    between: list[Entry] = []
    for at, (kind, stage, microbatch) in enumerate(entries[: last + 1]):
        if kind in KINDS:
            after = tuple(entries[at + 1 :]) if at == last else ()
            yield Action(kind, stage, microbatch, tuple(between), after)
            between = []
        else:
            between.append((kind, stage, microbatch))


def _steps(row: RankActions) -> tuple[Step, ...]:
    """Return a rank's actions and the messages that it sends, in order. A message without a `SENDS` entry
    follows the action that makes it.
    """
    stated = [*(a.messages for a in row), *(a.after for a in row[-1:])]
    behind = {
        (SENDS[kind], stage, microbatch): position - 1
        for position, entries in enumerate(stated)
        for kind, stage, microbatch in entries
        if kind in SENDS
    }
    steps: list[tuple[int, Step]] = list(enumerate(row))
    for position, action in enumerate(row):
        if (message := made_by(action)) is not None:
            steps.append((max(position, behind.get(message, position)), message))
    return tuple(step for _, step in sorted(steps, key=lambda one: one[0]))


def stages_that_free_outputs(schedule: PipelineSchedule) -> frozenset[int]:
    """Return the stages that free each output before the backward of its micro-batch (`DROP_F`). Stages
    without a backward are included.
    """
    freed: set[tuple[int, int]] = set()
    keeping: set[int] = set()
    for action in (a for row in schedule.actions for a in row):
        freed.update((stage, m) for kind, stage, m in action.messages if kind == "DROP_F")
        if action.kind in "BI" and (action.stage, action.microbatch) not in freed:
            keeping.add(action.stage)
    return frozenset(range(schedule.stages)) - keeping


@dataclass(frozen=True)
class StagePlan:
    """The memory (bytes) and times (microseconds) of a stage under a plan, for one micro-batch.

    A *transient* is the most bytes that a micro-batch needs during its action, kept bytes included,
    ``states`` and ``torch_bytes`` excluded.
    """

    stage: int
    kept_bytes: int
    """K: kept from F to B or I."""
    transient_forward: int
    """The transient of F."""
    transient_backward: int
    """The transient of I. That of a B is the larger of this and ``transient_weight`` + ``whole`` + new
    ``early_gradients``.
    """
    transient_weight: int = 0
    """The transient of W; 0 if the backward is not split."""
    states: int = 0
    """Bytes of parameters, buffers, optimizer states and whatever else exists during the whole step, except
    ``torch_bytes``.
    """
    torch_bytes: int = 0
    """Bytes of buffers from which a channel sends, and of the inputs and outputs of all micro-batches,
    outputs in ``left`` excluded.
    """
    forward: float = 0.0
    """The time of F."""
    backward: float = 0.0
    """The time of I, or of B if ``weight`` is 0."""
    weight: float = 0.0
    """The time of W."""
    extra: float = 0.0
    """The time of recomputation, which the three times include."""
    plan: Mapping[str, Any] | None = None
    """The plan as JSON data; None if there is none."""
    deferred_bytes: int = 0
    """D: kept from I to W; 0 if the backward is not split."""
    deferred_input: int = 0
    """The part of D that is the message from the previous stage, if W reads this message."""
    whole: int = 0
    """Bytes that the work of W needs in addition in a B: torch keeps outputs and their gradients to the end
    of a B, but frees them after an I.
    """
    gradients: int = 0
    """Bytes of the parameters' gradients, which exist from the first backward to the end of the step."""
    early_gradients: int = 0
    """Bytes of those that an I computes, because one op computes them together with the input's gradient."""
    first_backward: int | None = None
    """In place of ``transient_backward`` in the first B or I of a step; None: no difference."""
    first_weight: int | None = None
    """In place of ``transient_weight`` in the first B or W, without ``early_gradients``; None: no difference."""
    left: int = 0
    """Bytes that each B or I leaves until the end of the step: returned outputs and the loss."""
    closing: int = 0
    """Bytes in addition while torch joins the outputs of all micro-batches, after all actions."""
    opening: int = 0
    """Bytes in addition while torch prepares the step. A rank counts the largest ``opening`` of its stages."""
    ending: int = 0
    """Bytes in addition after the last action, while torch scales or reduces gradients. A rank counts the
    largest ``ending`` of its stages.
    """
    received: int = 0
    """Bytes of a message from the previous stage while it waits. During its action it counts to the transient."""
    answered: int = 0
    """The same for a message from the next stage."""
    sent: int = 0
    """Bytes of a message to the next stage after its micro-batch's backward; 0 if that stage is on the same rank."""
    returned: int = 0
    """Bytes of a message to the previous stage; 0 if that stage is on the same rank."""
    loose: int = 0
    """Bytes of a message to the next stage before its micro-batch's backward that ``kept_bytes`` does not include."""
    credits: int = 0
    """How many messages a channel receives ahead in each direction; 0 without channels."""

    def microseconds(self, kind: Kind) -> float:
        """Return the microseconds of an action of this kind."""
        return {
            "F": self.forward,
            "I": self.backward,
            "W": self.weight,
            "B": self.backward + self.weight,
        }[kind]


def stages_by_number(plans: Iterable[StagePlan]) -> dict[int, StagePlan]:
    """Return the stage plans as a dict, keyed by the number of the stage (`StagePlan.stage`)."""
    found: dict[int, StagePlan] = {}
    for plan in plans:
        if plan.stage in found:
            raise ProblemError(f"two plans are of stage {plan.stage}")
        found[plan.stage] = plan
    return found
