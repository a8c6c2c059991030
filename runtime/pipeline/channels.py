"""Messages between neighbours of a pipeline: a fixed number of places, receives posted ahead, credits.

A sender has as many places as credits. It fills one only after the receiver has begun to use the message that was in
it, which the receiver acknowledges; so no more messages than credits are under way. The receiver has as many receives
posted. It hands the tensors of a message over as they are, and posts a receive into new ones in their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rematplan.ir import ProcessEnded

MOST_TENSORS = 64
"""Of a message."""
ACKNOWLEDGEMENT = 1
"""Numbers in an acknowledgement."""


@dataclass(frozen=True)
class Peer:
    """A neighbour by its rank in a group. ``tag``: tells the messages of one direction from others; messages of one
    direction come in order."""

    group: ProcessGroup
    rank: int
    tag: int

    def sending(self, tensor: torch.Tensor, number: int) -> Any:
        """Begin to send the tensor of a number of a message."""
        with self.reached():
            return distributed.isend(tensor, group=self.group, group_dst=self.rank, tag=self._tag(number))

    def receiving(self, tensor: torch.Tensor, number: int) -> Any:
        """Begin to receive into a tensor."""
        with self.reached():
            return distributed.irecv(tensor, group=self.group, group_src=self.rank, tag=self._tag(number))

    def wait(self, work: Any) -> None:
        """Wait until a sending or receiving is over.

        Raises:
            ProcessEnded: the neighbour has ended.
        """
        with self.reached():
            work.wait()

    def _tag(self, number: int) -> int:
        return self.tag * (MOST_TENSORS + 1) + number

    def reached(self) -> _Reached:
        """A block in which errors of the connection are told in a line."""
        return _Reached(self.rank)


@dataclass(frozen=True)
class _Reached:
    rank: int

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            first = (str(error).splitlines() or [""])[0]
            raise ProcessEnded(
                f"rank {self.rank} of the pipeline has ended or cannot be reached: {first}"
            ) from None


class Sender:
    """The sending end of one direction, for one step.

    ``like``: tensors such as a message has, which may have no data. ``credits``: messages at most that are not
    acknowledged.
    """

    def __init__(self, peer: Peer, like: Sequence[torch.Tensor], credits: int, messages: int) -> None:
        self.peer, self.credits, self.count = peer, credits, 0
        self.places = [_place(like) for _ in range(min(credits, messages))]
        self.works: list[list[Any]] = [[] for _ in self.places]
        self.acknowledged: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy a message into a place, zeros for what is None, and begin to send it; waits for a credit."""
        at = self.count % self.credits
        if self.count >= self.credits:
            self._one_back()
            self._sent(at)
        for place, tensor in zip(self.places[at], tensors, strict=True):
            place.zero_() if tensor is None else place.copy_(tensor)
        answer = torch.empty(ACKNOWLEDGEMENT, dtype=torch.uint8)
        self.acknowledged.append((self.peer.receiving(answer, MOST_TENSORS), answer))
        self.works[at] = [self.peer.sending(t, k) for k, t in enumerate(self.places[at])]
        self.count += 1

    def finish(self) -> None:
        """Wait until all messages are used."""
        while self.acknowledged:
            self._one_back()
        for at in range(len(self.works)):
            self._sent(at)

    def _one_back(self) -> None:
        work, _answer = self.acknowledged.popleft()
        self.peer.wait(work)

    def _sent(self, at: int) -> None:
        for work in self.works[at]:
            self.peer.wait(work)
        self.works[at] = []


class Receiver:
    """The receiving end of one direction, for one step of so many messages."""

    def __init__(self, peer: Peer, like: Sequence[torch.Tensor], credits: int, messages: int) -> None:
        self.peer, self.like, self.left = peer, list(like), messages
        self.posted: deque[tuple[list[torch.Tensor], list[Any]]] = deque()
        self.answer = torch.zeros(ACKNOWLEDGEMENT, dtype=torch.uint8)
        self.answers: deque[Any] = deque(maxlen=credits + 1)
        for _ in range(credits):
            self._post()

    def take(self) -> list[torch.Tensor]:
        """The tensors of the next message, which are the caller's; waits for it."""
        tensors, works = self.posted.popleft()
        for work in works:
            self.peer.wait(work)
        del works
        self._post()
        if len(self.answers) == self.answers.maxlen:
            self.peer.wait(self.answers.popleft())
        self.answers.append(self.peer.sending(self.answer, MOST_TENSORS))
        return tensors

    def finish(self) -> None:
        """Wait until the last acknowledgements have left."""
        while self.answers:
            self.peer.wait(self.answers.popleft())

    def _post(self) -> None:
        if self.left:
            self.left -= 1
            tensors = _place(self.like)
            self.posted.append((tensors, [self.peer.receiving(t, k) for k, t in enumerate(tensors)]))


def _place(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype) for t in like]
