"""The actions of a pipeline's ranks in order, and the memory and times of the pipeline's stages, as plain data.

A micro-batch passes a stage in two or three actions: F (forward) and B (backward); or F, I (the part of the backward
that computes the input's gradient) and W (the part that computes the gradients of the weights). A B does the work of I
and then that of W.
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
    """One action of a rank: work on one micro-batch in one stage.

    ``kind``: F (forward), B (backward), I (backward for the input's gradient) or W (gradients of the weights).
    ``stage``, ``microbatch``: counted from 0. ``messages``: which messages the rank begins to receive or to send, and
    which sent ones it frees, after its previous action and before this one, in order. ``after``: the same after this
    action, if it is the rank's last one. ``before``, ``during``: the bytes that the rank holds outside of its stages
    after its previous action, and during this one. All four are ignored when actions are compared.
    """

    kind: Kind
    stage: int
    microbatch: int
    messages: tuple[Entry, ...] = field(default=(), compare=False)
    after: tuple[Entry, ...] = field(default=(), compare=False)
    before: int = field(default=0, compare=False)
    during: int = field(default=0, compare=False)

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

    ``name``: the schedule's name. ``stages``, ``ranks``, ``microbatches``: the number of each. ``actions``: for each
    rank, its actions in order. ``stage_of_rank``: for each rank, the numbers of its stages, ascending.

    Raises:
        ProblemError: there is not one list of actions for each rank; a stage has no rank or two; a rank has an action
            of a stage of another rank; or the actions of a micro-batch in a stage are not F, F and B, or F, I and W,
            in this order.
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
    """Return the pipeline schedule in which each rank runs the actions of one row, in order.

    ``rows``: for each rank, its actions as (kind, stage, micro-batch), and between them the starts of receives
    (`RECEIVES`) and sends (`SENDS`) and the frees of sent messages (`DROPS`). A receive that is left out begins
    directly before the action that reads the message. A send that is left out begins directly after the action that
    makes the message. A sent message that no entry frees exists until the end of the step. A rank has the stages that
    occur in its actions.
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
    """Return a rank's actions and the messages that it sends, in order. A message is sent where an entry of the row
    states it, otherwise directly after the action that makes it."""
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
    """Return the numbers of the stages whose outputs are freed before the backward of their micro-batch, once they are
    sent. The outputs of other stages exist until the backward, whether it reads them or not."""
    freed: set[tuple[int, int]] = set()
    keeping: set[int] = set()
    for action in (a for row in schedule.actions for a in row):
        freed.update((stage, m) for kind, stage, m in action.messages if kind == "DROP_F")
        if action.kind in "BI" and (action.stage, action.microbatch) not in freed:
            keeping.add(action.stage)
    return frozenset(range(schedule.stages)) - keeping


@dataclass(frozen=True)
class StagePlan:
    """The memory (bytes) and times (microseconds) of a pipeline stage that is executed by a plan, for one micro-batch.

    The actions are F (forward) and B (backward). A split backward has I (the input's gradient) and W (the gradients of
    the weights) instead of B. The *transient* of an action is the largest number of bytes that its micro-batch needs
    during the action, including bytes kept since an earlier action. It does not include bytes for other micro-batches,
    nor ``states`` and ``torch_bytes``. So the first forward of a rank with one stage has the peak ``states`` +
    ``torch_bytes`` + ``transient_forward``.

    ``stage``: the stage's number. ``kept_bytes`` (K): kept from F to B or I. ``deferred_bytes`` (D): kept from I to W.
    ``transient_forward``, ``transient_backward``, ``transient_weight``: the transients of F, I and W. ``whole``: bytes
    by which the same work needs more in a B, because torch keeps the outputs, their gradients and the input's gradient
    until a B ends, while it frees them at the end of an I. So the transient of a B is the larger of
    ``transient_backward`` and ``transient_weight`` + ``whole``. A stage whose backward is never split has 0 for
    ``transient_weight``, ``deferred_bytes``, ``whole`` and ``weight``. ``deferred_input``: the
    part of D that is the message from the previous stage, if W reads this message.

    ``gradients``: bytes of the parameters' gradients. The first backward of a step creates them; later ones add to
    them, so they stay until the end of the step. ``early_gradients``: bytes of those that an I computes, because one op
    computes them together with the input's gradient. ``first_backward``: used in place of ``transient_backward`` in
    the first B or I of a step. ``first_weight``: used in place of ``transient_weight`` in the first B or W of a step;
    it does not include ``early_gradients``. None: no difference.

    ``states``: bytes of parameters, buffers, optimizer states and everything else that exists during the whole step,
    except ``torch_bytes``: the buffers from which a channel sends, the inputs of all micro-batches, and the outputs of
    all micro-batches unless ``left`` has them. ``received``, ``answered``: the bytes of a message from the previous and
    from the next stage. A message that waits for its action counts with these bytes; during the action it counts to the
    transient. ``credits``: the number of messages that a channel receives ahead in each of the two directions, or all
    that are left if they are fewer; 0 without channels.
    ``sent``, ``returned``: the bytes of a message to the next and to the previous stage, after the micro-batch's
    backward. 0 if that stage is on the same rank, because there is no message. ``loose``: the bytes of a message to the
    next stage before the micro-batch's backward, without those that ``kept_bytes`` includes. ``left``: bytes that each
    B or I leaves in memory until the end of the step: returned outputs, and the loss. ``closing``: additional bytes
    when all actions are done and all sent messages are freed, while the outputs of all micro-batches are joined.
    ``opening``: additional bytes before the first action, while torch prepares the step. ``ending``: additional bytes
    after the last action, while torch divides gradients by the number of micro-batches, or reduces sharded gradients.
    Both exist once in a rank, however many stages it has.

    ``forward``, ``backward``, ``weight``: the times of F, I and W. If ``weight`` is 0, ``backward`` is the time of a B.
    ``extra``: the time of recomputation, which is included in these times. ``plan``: the plan as JSON data; None if
    there is none.
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
    deferred_input: int = 0
    whole: int = 0
    gradients: int = 0
    early_gradients: int = 0
    first_backward: int | None = None
    first_weight: int | None = None
    left: int = 0
    closing: int = 0
    opening: int = 0
    ending: int = 0
    received: int = 0
    answered: int = 0
    sent: int = 0
    returned: int = 0
    loose: int = 0
    credits: int = 0

    def microseconds(self, kind: Kind) -> float:
        """Return the microseconds of one action: F (forward), I (backward for the input's gradient), W (gradients of
        the weights), or B (backward: the sum of I and W)."""
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
