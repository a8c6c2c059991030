"""The bytes of the messages between stages that a rank holds while it does other work.

A received message waits from the start of its receive to the action that reads it; a sent one exists until it
is freed.

If both stages are on one rank, the output exists to the end of its own stage's backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rematplan.planner.pipeline.actions import DROPS, Action, Entry
from rematplan.planner.pipeline.stage_plan import StagePlan

READS = {"F": "F", "B": "B", "I": "B"}
"""For the kind of an action, the kind of the message that it reads and of the one that it makes: of a forward (F) or of
a backward (B)."""
_Key = tuple[str, str, int, int]
"""A message: "received" or "sent", its kind (F or B), the number of the stage that received or sent it, and its
micro-batch. With "ahead" and micro-batch 0 it is all messages of the kind that a channel has begun to receive."""


class _Held:
    """The bytes of messages by key, and their sum ``total``."""

    def __init__(self) -> None:
        self.bytes: dict[_Key, int] = {}
        self.total = 0

    def put(self, key: _Key, size: int) -> None:
        self.drop(key)
        self.bytes[key] = size
        self.total += size

    def drop(self, key: _Key) -> None:
        self.total -= self.bytes.pop(key, 0)


def message_bytes(actions: Iterable[Action], stages: Mapping[int, StagePlan]) -> Iterator[tuple[int, int]]:
    """Yield two numbers of message bytes for each action: the most since the previous action, and those during the
    action, without messages that it reads or makes.

    The last pair is for the time after the last action, and for the end of the step.
    """
    held = _Held()
    actions = list(actions)
    unread = Counter((READS[a.kind], a.stage) for a in actions if a.kind in READS)
    for kind, number in unread:
        _receive_ahead(held, kind, stages[number], unread[kind, number])
    after: tuple[Entry, ...] = ()
    for action in actions:
        most = _change(held, action.messages, stages)
        if action.kind in READS:
            kind = READS[action.kind]
            held.drop(("received", kind, action.stage, action.microbatch))
            unread[kind, action.stage] -= 1
            _receive_ahead(held, kind, stages[action.stage], unread[kind, action.stage])
        yield most, held.total
        _finish(held, action, stages)
        after = action.after
    yield _change(held, after, stages), held.total


def _receive_ahead(held: _Held, kind: str, stage: StagePlan, unread: int) -> None:
    """Set the bytes that a stage's channel has begun to receive. ``unread``: the messages that no action has
    begun to read.
    """
    size = stage.messages.arriving(kind) * min(stage.messages.credits, unread)
    held.put(("ahead", kind, stage.stage, 0), size)


def _change(held: _Held, entries: Iterable[Entry], stages: Mapping[int, StagePlan]) -> int:
    """Add to ``held`` the messages that ``entries`` receive or keep, and remove those that they forget or free. Return
    the largest number of bytes held before, between and after these entries."""
    most = held.total
    for kind, stage, microbatch in entries:
        if kind == "RECV_F":
            held.put(("received", "F", stage, microbatch), stages[stage].messages.received)
        elif kind in ("RECV_B", "KEEP_B"):
            held.put(("received", "B", stage, microbatch), stages[stage].messages.answered)
        elif kind == "FORGET_B":
            held.drop(("received", "B", stage, microbatch))
        elif kind in DROPS:
            held.drop(("sent", DROPS[kind], stage, microbatch))
        most = max(most, held.total)
    return most


def _finish(held: _Held, action: Action, stages: Mapping[int, StagePlan]) -> None:
    """Change ``held`` to the messages that exist after an action."""
    number, microbatch = action.stage, action.microbatch
    stage, own = stages[number], ("received", "F", number, microbatch)
    if action.kind == "W":
        if own in held.bytes:  # until now, `deferred` included a part of it
            held.put(own, stage.messages.received)
        return
    if action.kind == "F":
        if number + 1 in stages:
            held.put(("received", "F", number + 1, microbatch), stages[number + 1].messages.received)
        else:
            held.put(("sent", "F", number, microbatch), stage.held.loose)
        return
    held.drop(("received", "F", number + 1, microbatch))
    if number - 1 in stages:
        held.put(("received", "B", number - 1, microbatch), stages[number - 1].messages.answered)
        deferred = stage.held.deferred_input if action.kind == "I" else 0
        held.put(own, max(0, stage.messages.received - deferred))
    else:
        held.put(("sent", "B", number, microbatch), stage.messages.returned)
    if ("sent", "F", number, microbatch) in held.bytes:  # until now, `kept` included a part of it
        held.put(("sent", "F", number, microbatch), stage.messages.sent)
