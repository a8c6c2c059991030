"""Channels with credits: which messages are under way, and what is said of a neighbour that has ended."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import pytest
import torch

from rematplan.ir import ProcessEnded
from rematplan.planner.pipeline.gpipe_and_1f1b import dataflow, one_stage_a_rank
from rematplan.planner.pipeline.messages import least_credits
from rematplan.planner.pipeline.timeline import StageTimes, replay
from rematplan.runtime.pipeline.channels import MOST_TENSORS, Peer, Receiver, Sender

LIKE = [torch.empty(2, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")]


class Wire:
    """A connection that hands over what is sent when it is waited for. ``sent``: messages whose sending began."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[torch.Tensor]] = {}
        self.sent, self.posted = 0, 0

    def sending(self, tensor: torch.Tensor, number: int) -> Any:
        self.sent += number == 0
        self.queues.setdefault(number, deque()).append(tensor)
        return None

    def receiving(self, tensor: torch.Tensor, number: int) -> Any:
        self.posted += number == 0
        return tensor, number

    def wait(self, work: Any) -> None:
        if work is not None:
            tensor, number = work
            if not self.queues.get(number):
                raise BlockingIOError
            tensor.copy_(self.queues[number].popleft().clone())


def message(k: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(k)), torch.full((3,), k)]


@pytest.mark.parametrize("credits", [1, 2, 3])
def test_a_sender_waits_until_a_message_is_used_that_is_as_many_messages_old_as_credits(credits: int) -> None:
    wire: Any = Wire()
    sender = Sender(wire, LIKE, credits, 9)
    receiver = Receiver(wire, LIKE, credits, 9)
    assert wire.posted == credits  # ahead
    for k in range(credits):
        sender.send(message(k))
    assert wire.sent == credits
    with pytest.raises(BlockingIOError):
        sender.send(message(credits))
    assert wire.sent == credits
    sender.acknowledged.appendleft((wire.receiving(torch.empty(1, dtype=torch.uint8), MOST_TENSORS), None))
    for k in range(9):
        assert all(map(torch.equal, receiver.take(), message(k)))
        if k + credits < 9:
            sender.send(message(k + credits))
        assert wire.sent <= k + 1 + credits
    assert wire.posted == 9  # and not one more
    sender.finish()


def test_what_a_rank_does_not_use_is_freed_before_the_next_receive_begins() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    left: list[list[bool]] = []

    class Watched(Wire):
        def receiving(self, tensor: torch.Tensor, number: int) -> Any:
            left.append([one() is not None for one in seen[:2]])
            seen.append(weakref.ref(tensor))
            return super().receiving(tensor, number)

    wire: Any = Watched()
    sender, receiver = Sender(wire, LIKE, 1, 2), Receiver(wire, LIKE, 1, 2, unused={1})
    sender.send(message(5))
    found = receiver.take()
    assert torch.equal(found[0], message(5)[0])
    assert found[1].is_meta
    assert left[-2:] == [[True, False], [True, False]]


def test_a_gradient_that_there_is_none_of_is_sent_as_zeros() -> None:
    wire: Any = Wire()
    Sender(wire, LIKE, 1, 1).send([None, message(4)[1]])
    assert torch.equal(Receiver(wire, LIKE, 1, 1).take()[0], torch.zeros(2))


def test_an_error_of_the_connection_is_told_in_a_line_that_names_the_neighbour() -> None:
    why = "^rank 3 of the pipeline has ended or cannot be reached; its output, or torchrun's, says why$"
    group: Any = None  # it is not used
    with pytest.raises(ProcessEnded, match=why), Peer(group, 3, 0).reached():
        raise RuntimeError("closed\nby peer")


@pytest.mark.parametrize("hop", [0.0, 0.1, 0.5, 1.0, 4.0])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 16), (8, 32)])
def test_credits_are_enough_and_one_less_is_not(stages: int, microbatches: int, hop: float) -> None:
    schedule = dataflow(stages, microbatches, hop)
    times = [StageTimes(1, 2)] * stages
    enough = least_credits(schedule)
    replay(schedule, times, credits=enough)  # raises where it deadlocks
    assert 1 <= enough <= microbatches


def test_more_credits_are_taken_where_few_deadlock() -> None:
    schedule = one_stage_a_rank("dataflow", [17, 1], 32)
    assert least_credits(schedule) > 1
