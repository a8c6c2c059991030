"""The bytes that a rank of a pipeline holds while it runs its actions.

    bytes during an action = Σ states + Σ torch_bytes + Σ gradients
                             + Σ over stages (in flight · K + deferred · D + finished · left)
                             + messages + the action's transient
    bytes before an action = the same without a transient, but with the messages that exist before it
    bytes at the end       = the same without a transient, but with the largest ``ending``; or with Σ closing
    bytes at the start     = Σ states + Σ torch_bytes + the largest ``opening``

The terms are fields of the parts of a `StagePlan`; K is ``kept``, D is ``deferred``. A micro-batch is in flight
from its F to its B or I, deferred from I to W, and finished after B or I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rematplan.planner.pipeline.actions import Action, Kind, PipelineSchedule
from rematplan.planner.pipeline.live_messages import message_bytes
from rematplan.planner.pipeline.stage_plan import StagePlan, stages_by_number

PARTS: Mapping[Kind, str] = {"F": "", "B": "IW", "I": "I", "W": "W"}
"""For each kind of action, the parts of the backward that it does: I (the input's gradient), W (those of the weights),
both or none."""


def rank_bytes(actions: Iterable[Action], plans: Iterable[StagePlan]) -> Iterator[tuple[int, int]]:
    """Yield, for each action, the most bytes that the rank holds since the previous action, and during this
    one.

    The last pair is for the time after the last action, and for the end of the step.
    """
    stages = stages_by_number(plans)
    actions = list(actions)
    messages = message_bytes(actions, stages)
    resident = sum(p.standing.always for p in stages.values())
    # A stage and "I" or "W": the gradients that this action computes exist.
    made: set[tuple[int, str]] = set()
    for action in actions:
        stage = stages[action.stage]
        new = {kind for kind in PARTS[action.kind] if (action.stage, kind) not in made}
        before, during = next(messages)
        others = resident - stage.held.taken_over(action.kind)
        transient = stage.transients.during(action.kind, new, stage.held.new_gradients(new & {"I"}))
        yield resident + before + action.before, others + during + action.during + transient
        made.update((action.stage, kind) for kind in new)
        resident = others + stage.held.handed_on(action.kind) + stage.held.new_gradients(new)
        resident += stage.standing.left * (action.kind in "BI")
    ending = max((p.standing.ending for p in stages.values()), default=0)
    closing = sum(p.standing.closing for p in stages.values())
    before, during = next(messages)
    yield resident + before, resident + max(during + ending, closing)


def message_buffers(actions: Iterable[Action], plans: Iterable[StagePlan]) -> int:
    """Return the most bytes that a rank holds as received messages for later actions, ``torch_bytes`` included."""
    received = {
        n: replace(p, held=replace(p.held, loose=0), messages=replace(p.messages, sent=0, returned=0))
        for n, p in stages_by_number(plans).items()
    }
    waiting = max(during for _, during in message_bytes(actions, received))
    return sum(one.standing.torch_bytes for one in received.values()) + waiting


def rank_peak(actions: Iterable[Action], plans: Iterable[StagePlan]) -> int:
    """Return the most bytes that a rank holds at any moment of a step. ``actions``: in order."""
    stages = tuple(plans)
    opening = max((p.standing.opening for p in stages), default=0)
    return max(sum(p.standing.always for p in stages) + opening, *map(max, rank_bytes(actions, stages)))


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


def stages_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return, for each stage of a schedule, the most micro-batches in flight at once, as `in_flight` counts them."""
    most = {stage: n for row in schedule.actions for stage, n in in_flight(row).items()}
    return tuple(most[stage] for stage in range(schedule.stages))
