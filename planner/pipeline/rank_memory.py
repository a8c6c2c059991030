"""The bytes that a rank of a pipeline holds while it runs its actions.

    bytes during an action = Σ states + Σ torch_bytes + Σ gradients
                             + Σ over stages (in flight · K + deferred · D + finished · left)
                             + messages + the action's transient
    bytes before an action = the same without a transient, but with the messages that exist before it
    bytes at the end       = the same without a transient, but with the largest ``ending``; or with Σ closing
    bytes at the start     = Σ states + Σ torch_bytes + the largest ``opening``

The terms are fields of `StagePlan`; K is ``kept_bytes``, D is ``deferred_bytes``. A micro-batch is in flight
from its F to its B or I, deferred from I to W, and finished after B or I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from rematplan.planner.pipeline.actions import Action, Kind, StagePlan, stages_by_number
from rematplan.planner.pipeline.live_messages import message_bytes

PARTS: Mapping[Kind, str] = {"F": "", "B": "IW", "I": "I", "W": "W"}
"""For each kind of action, the parts of the backward that it does: I, W, both or none."""


def rank_bytes(actions: Iterable[Action], plans: Iterable[StagePlan]) -> Iterator[tuple[int, int]]:
    """Yield, for each action, the most bytes that the rank holds since the previous action, and during this
    one.

    The last pair is for the time after the last action, and for the end of the step.
    """
    stages = stages_by_number(plans)
    actions = list(actions)
    messages = message_bytes(actions, stages)
    resident = sum(p.states + p.torch_bytes for p in stages.values())
    made: set[tuple[int, str]] = (
        set()
    )  # a stage and "I" or "W": the gradients that this action computes exist
    for action in actions:
        stage = stages[action.stage]
        new = {kind for kind in PARTS[action.kind] if (action.stage, kind) not in made}
        before, during = next(messages)
        others = resident - _taken_over(stage, action)
        yield (
            resident + before + action.before,
            others + during + action.during + _transient(stage, action, new),
        )
        made.update((action.stage, kind) for kind in new)
        resident = others + _handed_on(stage, action)
        resident += stage.early_gradients * ("I" in new)
        resident += (stage.gradients - stage.early_gradients) * ("W" in new)
    ending = max((p.ending for p in stages.values()), default=0)
    before, during = next(messages)
    yield resident + before, resident + max(during + ending, sum(p.closing for p in stages.values()))


def message_buffers(actions: Iterable[Action], plans: Iterable[StagePlan]) -> int:
    """Return the most bytes that a rank holds as received messages for later actions, ``torch_bytes`` included."""
    received = {n: replace(p, sent=0, returned=0, loose=0) for n, p in stages_by_number(plans).items()}
    waiting = max(during for _, during in message_bytes(actions, received))
    return sum(one.torch_bytes for one in received.values()) + waiting


def rank_peak(actions: Iterable[Action], plans: Iterable[StagePlan]) -> int:
    """Return the most bytes that a rank holds at any moment of a step. ``actions``: in order."""
    stages = tuple(plans)
    prepared = sum(p.states + p.torch_bytes for p in stages) + max((p.opening for p in stages), default=0)
    return max(prepared, *map(max, rank_bytes(actions, stages)))


def in_flight(actions: Iterable[Action]) -> Mapping[int, int]:
    """Return, by stage, the most micro-batches in flight at once: between the start of F and the end of B or I."""
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in actions:
        if action.kind == "F":
            now[action.stage] += 1
            most[action.stage] = max(most[action.stage], now[action.stage])
        elif action.kind != "W":
            now[action.stage] -= 1
    return dict(most)


def _taken_over(stage: StagePlan, action: Action) -> int:
    """Return the bytes that an earlier action kept for the action's micro-batch, which the action's transient
    includes.
    """
    return {"F": 0, "B": stage.kept_bytes, "I": stage.kept_bytes, "W": stage.deferred_bytes}[action.kind]


def _handed_on(stage: StagePlan, action: Action) -> int:
    """Return the bytes that the action keeps for its micro-batch after its end, for later actions or until the end of
    the step."""
    return {
        "F": stage.kept_bytes,
        "B": stage.left,
        "I": stage.deferred_bytes + stage.left,
        "W": 0,
    }[action.kind]


def _transient(stage: StagePlan, action: Action, new: Set[str]) -> int:
    """Return the most bytes that an action's micro-batch needs during it. ``new``: the parts (I, W) that its
    stage does for the first time.
    """
    backward, weight = stage.transient_backward, stage.transient_weight
    if "I" in new and stage.first_backward is not None:
        backward = stage.first_backward
    if "W" in new and stage.first_weight is not None:
        weight = stage.first_weight
    early = stage.early_gradients if "I" in new else 0
    return {
        "F": stage.transient_forward,
        "B": max(backward, weight + stage.whole + early),
        "I": backward,
        "W": weight,
    }[action.kind]
