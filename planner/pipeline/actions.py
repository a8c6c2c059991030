"""The actions of a pipeline's ranks in order, as plain data.

A micro-batch passes a stage as F (forward) and B (backward), or as F, I (the input's gradient) and W (the
weights' gradients).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from rematplan.ir import ProblemError

Kind = Literal["F", "B", "I", "W"]
"""The kind of an action.

F: forward. B: backward. I: the part of a backward that computes the input's gradient. W: the rest of it, which
computes the gradients of the weights.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)
RECEIVES = {"RECV_F": "F", "RECV_B": "B"}
"""The kinds of entries with which a rank begins to receive a message. By each, the message's kind: F (from the previous
stage) or B (from the next stage)."""
SENDS = {"SEND_F": "F", "SEND_B": "B"}
"""The kinds of entries with which a rank begins to send a message. By each, the message's kind: F (an output for the
next stage) or B (a gradient for the previous stage)."""
KEEPS = ("KEEP_B", "FORGET_B")
"""The kinds of entries that begin and end a time in which a received gradient still exists, although the action that
reads it is over."""
DROPS = {"DROP_F": "F", "DROP_B": "B"}
"""The kinds of entries with which a rank frees a message that it has sent. By each, the message's kind: F (an output)
or B (a gradient of an input)."""
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
    """Such messages after this action, if it is the rank's last one."""
    before: int = field(default=0, compare=False)
    """Bytes that the rank holds outside of its stages after its previous action."""
    during: int = field(default=0, compare=False)
    """Bytes that the rank holds outside of its stages during this action."""

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

    Raises a ProblemError unless there are ``ranks`` lists and each stage has exactly one rank. Each rank must run
    exactly F, F B, or F I W for each micro-batch in each of its stages."""

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
        """Raise `ProblemError` unless the rank runs, for each micro-batch in each of its stages, exactly F, F B, or F I
        W in this order."""
        kinds: dict[tuple[int, int], str] = {}
        for a in actions:
            kinds[a.stage, a.microbatch] = kinds.get((a.stage, a.microbatch), "") + a.kind
        # Read up to the first that is missing.
        every = ((s, m) for s in stages for m in range(self.microbatches))
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
    """Return the schedule in which each rank runs one row: (kind, stage, micro-batch) of actions and of entries between
    them.

    A send without an entry begins right after the action that makes the message. `ProblemError` for an unknown kind, or
    for rows that `PipelineSchedule` refuses.
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
    """Yield a row's actions, each with the entries between the action before it and itself; the last one also has
    those after it."""
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
    """Return a rank's actions and the messages that it sends, in order. A message is sent at its `SENDS` entry, but not
    before the action that makes it; without an entry, it follows this action."""
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
