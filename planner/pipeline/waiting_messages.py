"""Which received messages of a pipeline's stages exist while their rank does other work.

A rank allocates the buffer of a message when it begins to receive it, and frees it after the message's micro-batch has
used it. So a message *waits* from the time when its receive begins to the start of the action that reads it.

A stage whose neighbour is on the same rank gets the neighbour's tensors themselves. The output of a stage then exists
to the end of the stage's own backward, even while the next stage does not need it. So it also waits for the next stage
from the end of that stage's backward to the end of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rematplan.planner.pipeline.actions import Action, Message

READS = {"F": "F", "B": "B", "I": "B"}
"""For the kind of an action, the kind of the message that it reads: of a forward (F) or of a backward (B)."""


def waiting_messages(actions: Iterable[Action]) -> Iterator[frozenset[Message]]:
    """Yield, for each of a rank's actions, the messages that wait during it, and the messages that wait at the end.

    A message that the running action reads does not wait any more.

    Args:
        actions: the rank's actions in order. The receives of messages from other ranks that begin before an action are
            in its ``receives``.
    """
    rows = list(actions)
    own = {action.stage for action in rows}
    waiting: set[Message] = set()
    for action in rows:
        stage, microbatch, read = action.stage, action.microbatch, READS.get(action.kind)
        waiting.update(action.receives)
        waiting.discard((read or "", stage, microbatch))
        yield frozenset(waiting)
        if read == "B":
            waiting.discard(("F", stage + 1, microbatch))
        if read == "F" and stage + 1 in own:
            waiting.add(("F", stage + 1, microbatch))
        if read == "B" and stage - 1 in own:
            waiting |= {("B", stage - 1, microbatch), ("F", stage, microbatch)}
    yield frozenset(waiting)
