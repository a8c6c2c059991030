"""The bytes that a rank of a pipeline holds while it runs its actions.

    bytes during an action = Σ states + Σ bytes for messages + Σ gradients computed so far
                             + Σ over stages (micro-batches in flight · K + deferred · D + finished · left)
                             + the action's transient

K, D, left and transient are fields of `StagePlan`. A micro-batch is in flight from its F to its B or I, and deferred
from its I to its W. The micro-batch of the running action is counted only in the action's transient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rematplan.planner.pipeline.actions import Action, StagePlan, stages_by_number


def rank_bytes(actions: Iterable[Action], plans: Iterable[StagePlan]) -> Iterator[int]:
    """Yield the largest number of bytes that a rank holds during each of its actions, and last, at the end of the
    step.

    ``actions``: the rank's actions in order. ``plans``: the memory of each of the rank's stages.

    Raises:
        ProblemError: two plans are of the same stage.
    """
    stages = stages_by_number(plans)
    resident = sum(p.states + p.torch_bytes for p in stages.values())
    made: set[int] = set()  # stages whose gradients are there
    pending: dict[int, int] = {}
    for action in actions:
        stage = stages[action.stage]
        resident -= _taken_over(stage, action)
        yield resident + sum(pending.values()) + _transient(stage, action, action.stage not in made)
        if action.kind in "BW" and action.stage not in made:
            made.add(action.stage)
            resident += stage.gradients
        if action.kind in "BI":
            pending[action.stage] = stage.pending
        resident += _handed_on(stage, action)
    yield resident + sum(p.closing for p in stages.values())


def rank_peak(actions: Iterable[Action], plans: Iterable[StagePlan]) -> int:
    """Return the most bytes that a rank holds at any moment of a step.

    ``actions``: the rank's actions in order. ``plans``: the memory of each of the rank's stages.

    Raises:
        ProblemError: two plans are of the same stage.
    """
    return max(rank_bytes(actions, plans))


def in_flight(actions: Iterable[Action]) -> Mapping[int, int]:
    """Return, for each stage that runs a forward among ``actions``, the most micro-batches that are in flight at
    once.

    ``actions``: of one rank, in order. A micro-batch is in flight from the start of its forward (F) to the end of its
    backward (B), or of the part of its backward that computes the input's gradient (I).
    """
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
    """Return the bytes that are held for the action's micro-batch when the action starts."""
    return {"F": 0, "B": stage.kept_bytes, "I": stage.kept_bytes, "W": stage.deferred_bytes}[action.kind]


def _handed_on(stage: StagePlan, action: Action) -> int:
    """Return the bytes that remain for the action's micro-batch after the action."""
    return {
        "F": stage.kept_bytes,
        "B": stage.left,
        "I": stage.deferred_bytes + stage.left,
        "W": 0,
    }[action.kind]


def _transient(stage: StagePlan, action: Action, first: bool) -> int:
    backward, weight = stage.transient_backward, stage.transient_weight
    if first:
        backward = backward if stage.first_backward is None else stage.first_backward
        weight = weight if stage.first_weight is None else stage.first_weight
    return {
        "F": stage.transient_forward,
        "B": max(backward, weight + stage.whole if stage.transient_weight else 0),
        "I": stage.transient_backward,
        "W": weight,
    }[action.kind]
