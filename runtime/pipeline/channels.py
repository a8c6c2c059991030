"""Messages between neighbouring ranks of a pipeline, with flow control by credits.

A sender has one buffer for each credit, and reuses it after the receiver has begun to use its last message. The
receiver posts one receive for each credit ahead, and passes received tensors on without a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rematplan.ir import ProcessEnded

MOST_TENSORS = 64
"""The largest number of tensors in a message."""
ACKNOWLEDGEMENT = 1
"""Bytes of an acknowledgement."""


@dataclass(frozen=True)
class Peer:
    """A neighbouring rank of a pipeline, for messages of forwards or backwards. Messages with one tag arrive in
    order."""

    group: ProcessGroup
    """The processes of the pipeline."""
    rank: int
    """The neighbour's rank in the group."""
    tag: int
    """Distinguishes the messages of this direction from all others."""

    def sending(self, tensor: torch.Tensor, number: int) -> Any:
        """Begin to send a tensor and return the pending operation. ``number``: the tensor's position in its message."""
        with self.reached():
            return distributed.isend(tensor, group=self.group, group_dst=self.rank, tag=self._tag(number))

    def receiving(self, tensor: torch.Tensor, number: int) -> Any:
        """Begin to receive into a tensor and return the pending operation. ``number``: the tensor's position in its
        message."""
        with self.reached():
            return distributed.irecv(tensor, group=self.group, group_src=self.rank, tag=self._tag(number))

    def wait(self, work: Any) -> None:
        """Wait until an operation that `sending` or `receiving` has begun is finished."""
        with self.reached():
            work.wait()

    def _tag(self, number: int) -> int:
        return self.tag * (MOST_TENSORS + 1) + number

    @contextmanager
    def reached(self) -> Iterator[None]:
        """A context in which a RuntimeError, a failed connection, becomes a `ProcessEnded` with a line that names
        the neighbour."""
        try:
            yield
        except RuntimeError:
            raise ProcessEnded(
                f"rank {self.rank} of the pipeline has ended or cannot be reached; its output, or torchrun's, says why"
            ) from None


class Sender:
    """Sends one training step's ``messages`` in one direction to a neighbouring rank, at most ``credits`` of them
    unacknowledged. ``like``: tensors with the shapes and types of a message, perhaps on the meta device."""

    def __init__(self, peer: Peer, like: Sequence[torch.Tensor], credits: int, messages: int) -> None:
        self.peer, self.credits, self.count = peer, credits, 0
        self.places = [_place(like) for _ in range(min(credits, messages))]
        self.works: list[list[Any]] = [[] for _ in self.places]
        self.acknowledged: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy a message into a buffer, None as zeros, and begin to send it. If no buffer is free, first wait for the
        acknowledgement of the oldest message."""
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
        """Wait until all messages are sent and acknowledged."""
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
    """Receives one training step's ``messages`` in one direction from a neighbouring rank, with ``credits`` receives
    posted ahead. ``like``: tensors with the shapes and types of a message. ``unused``: the positions of tensors in a
    message that this rank does not use."""

    def __init__(
        self,
        peer: Peer,
        like: Sequence[torch.Tensor],
        credits: int,
        messages: int,
        unused: Collection[int] = (),
    ) -> None:
        self.peer, self.like, self.left, self.unused = peer, list(like), messages, unused
        self.posted: deque[tuple[list[torch.Tensor], list[Any]]] = deque()
        self.answer = torch.zeros(ACKNOWLEDGEMENT, dtype=torch.uint8)
        self.answers: deque[Any] = deque(maxlen=credits + 1)
        for _ in range(credits):
            self._post()

    def take(self) -> list[torch.Tensor]:
        """Wait for the next message, acknowledge it and return its tensors, with those of ``like`` in place of unused
        ones. The memory of received tensors is not reused."""
        received, works = self.posted.popleft()
        while works:  # each holds its tensor
            self.peer.wait(works.pop())
        tensors = [self.like[at] if at in self.unused else t for at, t in enumerate(received)]
        del received
        self._post()
        if len(self.answers) == self.answers.maxlen:
            self.peer.wait(self.answers.popleft())
        self.answers.append(self.peer.sending(self.answer, MOST_TENSORS))
        return tensors

    def finish(self) -> None:
        """Wait until the acknowledgements of all messages are sent."""
        while self.answers:
            self.peer.wait(self.answers.popleft())

    def _post(self) -> None:
        if self.left:
            self.left -= 1
            tensors = _place(self.like)
            self.posted.append((tensors, [self.peer.receiving(t, k) for k, t in enumerate(tensors)]))


def _place(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype) for t in like]
