"""Replay a pipeline's schedule: when each action runs, given the times of stages and links.

A rank runs its actions one after another. F of a stage waits for the stage before it. B or I waits for the stage
after it; in the last stage it waits for F. W waits for the I of its micro-batch. A message is sent when the action
that computes it ends. Messages from one rank to another follow each other on one link, and arrive after the link's
latency. Stages on the same rank need no messages. The replay takes O(actions · ranks) time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rematplan.ir import ProblemError
from rematplan.planner.pipeline.actions import Action, PipelineSchedule


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage in microseconds, and the bytes of its messages, for one micro-batch.

    ``forward``: of its forward. ``backward``: of its backward without the gradients of weights, if these are computed
    separately; else of the whole backward. ``weight``: of the gradients of weights; 0 if not computed separately.
    ``sends``: bytes of the message to the next stage in the forward. ``returns``: bytes of the message to the
    previous stage in the backward.
    """

    forward: float
    backward: float
    weight: float = 0.0
    sends: int = 0
    returns: int = 0

    @property
    def total(self) -> float:
        """The microseconds of forward and backward together, for one micro-batch."""
        return self.forward + self.backward + self.weight

    def of(self, kind: str) -> float:
        """Return the microseconds of an action of a kind: F (forward), I (backward for the input's gradient), W
        (gradients of weights) or B (I and W together)."""
        times = {"F": self.forward, "B": self.backward + self.weight, "I": self.backward, "W": self.weight}
        return times[kind]


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks. ``latency``: microseconds. ``bandwidth``: bytes per microsecond."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def occupied(self, size: int) -> float:
        """Return the microseconds for which a message of ``size`` bytes occupies the link: size ÷ bandwidth."""
        return size / self.bandwidth

    def travel(self, size: int) -> float:
        """Return the microseconds from the start of a message of ``size`` bytes to its arrival, on an idle link:
        occupation plus latency."""
        return self.latency + self.occupied(size)


FREE_LINK = Link()
"""A link that takes no time."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a pipeline's rank and its time. ``start``, ``end``: microseconds since the start of the first
    action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated pipeline schedule. ``rows``: for each rank, its actions with their start and end, in order."""

    schedule: PipelineSchedule
    rows: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """The microseconds from the start of the first action to the end of the last."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the microseconds in which it works."""
        return tuple(math.fsum(span.end - span.start for span in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """The share (0 to 1) of all ranks' time, up to the end of the last action, in which they do not work; 0
        without actions."""
        return 1 - math.fsum(self.busy) / (self.makespan * len(self.rows)) if self.makespan else 0.0


def replay(
    schedule: PipelineSchedule,
    times: Sequence[StageTimes],
    link: Link = FREE_LINK,
    overhead: float = 0.0,
    credits: int | None = None,
) -> Timeline:
    """Simulate a schedule and return when each action starts and ends.

    Args:
        schedule: the actions of each rank.
        times: for each stage, its times and message sizes.
        link: latency and bandwidth between ranks.
        overhead: microseconds that each action takes in addition to its stage's time.
        credits: how many messages in one direction between two stages may be sent and not yet read. Before one more
            is sent, the sending rank waits until the receiver begins to use the earliest of them. None: no limit.

    Raises:
        ProblemError: a deadlock. The message names the first action that waits forever.
    """
    run = _Replay(schedule, times, link, overhead, credits)
    ranks = range(schedule.ranks)
    while sum(map(run.advance, ranks)):
        pass
    blocked = [(run.free[rank], rank) for rank in ranks if not run.done(rank)]
    if blocked:
        rank = min(blocked)[1]
        raise ProblemError(
            f"{schedule.name}: deadlock: action {run.next(rank)} of rank {rank} waits forever for "
            f"{run.waits_for(rank)}"
        )
    return Timeline(schedule, tuple(map(tuple, run.rows)))


_Message = tuple[str, int, int]
"""The direction (F or B), the stage that sends it, and the micro-batch."""


class _Replay:
    """The state of a simulation. ``at``: the index of each rank's next action. ``free``: when the rank can start that
    action, in microseconds."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        times: Sequence[StageTimes],
        link: Link,
        overhead: float,
        credits: int | None,
    ) -> None:
        self.schedule, self.times, self.link = schedule, times, link
        self.overhead, self.credits = overhead, credits
        self.at, self.free = [0] * schedule.ranks, [0.0] * schedule.ranks
        self.rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
        self.rank_of = {s: r for r, stages in enumerate(schedule.stage_of_rank) for s in stages}
        self.made: dict[_Message, float] = {}  # when the action that computes it ended
        self.arrived: dict[_Message, float] = {}  # when the receiving stage can use it
        self.sent: dict[tuple[str, int], int] = {}  # messages by direction and sending stage
        self.read: dict[tuple[str, int], list[float]] = {}  # when each of these was first used
        self.link_free: dict[tuple[int, int], float] = {}  # when a link is idle, by the ranks at its ends

    def advance(self, rank: int) -> bool:
        """Run the actions of a rank that can run; return whether there was any."""
        moved = False
        while not self.done(rank) and self._step(rank, self.next(rank)):
            moved = True
        return moved

    def done(self, rank: int) -> bool:
        """Return whether the rank has run all its actions."""
        return self.at[rank] == len(self.schedule.actions[rank])

    def next(self, rank: int) -> Action:
        """Return the next action of the rank, or the one whose message cannot be sent yet."""
        return self.schedule.actions[rank][self.at[rank]]

    def waits_for(self, rank: int) -> str:
        """Return, as text, what the rank's next action waits for."""
        action = self.next(rank)
        if len(self.rows[rank]) > self.at[rank]:
            return f"a credit: {self.credits} of its messages are sent and not read"
        kind, stage, m = next(need for need, time in self._needs(action) if time is None)
        return f"{stage}{kind}{m}"

    def _step(self, rank: int, action: Action) -> bool:
        """Start the rank's next action, if it has not started, and send its message; return whether either was
        possible.
        """
        begun = len(self.rows[rank]) > self.at[rank]
        if not begun and not self._begin(rank, action):
            return False
        if self._hand_over(rank, action):
            self.at[rank] += 1
            return True
        return not begun

    def _begin(self, rank: int, action: Action) -> bool:
        needs = self._needs(action)
        ready = [time for _, time in needs if time is not None]
        if len(ready) < len(needs):
            return False
        start = max([self.free[rank], *ready])
        self.free[rank] = start + self.times[action.stage].of(action.kind) + self.overhead
        self.rows[rank].append(Span(action, start, self.free[rank]))
        for (kind, stage, _), _time in needs:
            if stage != action.stage:
                self.read.setdefault((kind, stage), []).append(start)
        if action.kind != "W":
            self.made[_half(action), action.stage, action.microbatch] = self.free[rank]
        return True

    def _needs(self, action: Action) -> list[tuple[_Message, float | None]]:
        """Return the messages that an action reads, each with the time from which it is available, or None."""
        stage, m, last = action.stage, action.microbatch, self.schedule.stages - 1
        if action.kind == "F":
            before = ("F", stage - 1, m)
            return [(before, self.arrived.get(before))] if stage else []
        if action.kind == "W":
            return [(("B", stage, m), self.made.get(("B", stage, m)))]
        own, after = ("F", stage, m), ("B", stage + 1, m)
        answer = [(after, self.arrived.get(after))] if stage < last else []
        return [(own, self.made.get(own)), *answer]

    def _hand_over(self, rank: int, action: Action) -> bool:
        """Send the action's message; return False if too many messages are unread."""
        half, stage = _half(action), action.stage
        to = stage + 1 if half == "F" else stage - 1
        if action.kind == "W" or not 0 <= to < self.schedule.stages:
            return True
        message = (half, stage, action.microbatch)
        if self.rank_of[to] == rank:
            self.arrived[message] = self.free[rank]
            return True
        before = self.sent.get((half, stage), 0)
        if self.credits is not None and before >= self.credits:
            read = self.read.get((half, stage), [])
            if len(read) <= before - self.credits:
                return False
            self.free[rank] = max(self.free[rank], read[before - self.credits])
        self.sent[half, stage] = before + 1
        times = self.times[stage]
        size = times.sends if half == "F" else times.returns
        ends = (rank, self.rank_of[to])
        self.link_free[ends] = max(self.free[rank], self.link_free.get(ends, 0.0)) + self.link.occupied(size)
        self.arrived[message] = self.link_free[ends] + self.link.latency
        return True


def _half(action: Action) -> str:
    return "F" if action.kind == "F" else "B"
