"""Simulate a pipeline's schedule in time: when each action of each rank starts and ends. O(actions · ranks).

A rank runs its actions in order; an action waits for its messages and earlier parts. Messages between two
ranks occupy one link in turn, and arrive after its latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rematplan.ir import ProblemError
from rematplan.planner.pipeline.actions import Action, Message, PipelineSchedule, Step, made_by


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage in microseconds and the bytes of its messages, for one micro-batch."""

    forward: float
    backward: float
    """Without the gradients of weights, if another action computes them."""
    weight: float = 0.0
    """The time of this action; 0 if there is none."""
    sends: int = 0
    """Bytes of the forward's message to the next stage."""
    returns: int = 0
    """Bytes of the backward's message to the previous stage."""

    @property
    def total(self) -> float:
        """The microseconds of the stage's forward and whole backward for one micro-batch."""
        return self.forward + self.backward + self.weight

    def of(self, kind: str) -> float:
        """Return the microseconds of an action of this kind."""
        times = {"F": self.forward, "B": self.backward + self.weight, "I": self.backward, "W": self.weight}
        return times[kind]


@dataclass(frozen=True, slots=True)
class Link:
    """A network link between two ranks. ``latency``: microseconds. ``bandwidth``: bytes per microsecond."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def occupied(self, size: int) -> float:
        """Return the microseconds for which a message of ``size`` bytes occupies the link, so that no other message can
        be sent: size ÷ bandwidth."""
        return size / self.bandwidth

    def travel(self, size: int) -> float:
        """Return the microseconds from the start of a message of ``size`` bytes to its arrival, if the link is idle:
        size ÷ bandwidth + latency."""
        return self.latency + self.occupied(size)


FREE_LINK = Link()
"""A link over which messages take no time."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a pipeline's rank with its simulated time. ``start``, ``end``: microseconds since the first action
    of the pipeline started."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A pipeline schedule with simulated times. ``rows``: for each rank, its actions in order, each with its start and
    end."""

    schedule: PipelineSchedule
    rows: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """The microseconds from the start of the pipeline's first action to the end of its last action; 0 without
        actions."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the sum of the microseconds of its actions: the time in which the rank is not idle."""
        return tuple(math.fsum(span.end - span.start for span in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """The fraction (0 to 1) of the ranks' time, to the end of the pipeline's last action, in which they
        are idle; 0 without actions.
        """
        return 1 - math.fsum(self.busy) / (self.makespan * len(self.rows)) if self.makespan else 0.0


def replay(
    schedule: PipelineSchedule,
    times: Sequence[StageTimes],
    link: Link = FREE_LINK,
    overhead: float = 0.0,
    credits: int | None = None,
) -> Timeline:
    """Simulate a pipeline's schedule. Return when each action starts and ends; `ProblemError` for a deadlock.
    ``overhead``: microseconds of each action beyond ``times``. ``credits``: how many of a stage's messages in one
    direction may be sent and not read; None: any number."""
    run = _Replay(schedule, times, link, overhead, credits)
    ranks = range(schedule.ranks)
    while sum(map(run.advance, ranks)):
        pass
    blocked = [(run.free[rank], rank) for rank in ranks if not run.done(rank)]
    if blocked:
        rank = min(blocked)[1]
        raise ProblemError(
            f"{schedule.name}: deadlock: action {_name(run.next(rank))} of rank {rank} waits forever for "
            f"{run.waits_for(rank)}"
        )
    return Timeline(schedule, tuple(map(tuple, run.rows)))


class _Replay:
    """The state of a simulation of a pipeline's schedule."""

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
        self.steps = schedule.steps
        # For each rank: the index of its next step, and the microsecond from which it can begin that step.
        self.at, self.free = [0] * schedule.ranks, [0.0] * schedule.ranks
        self.rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
        self.rank_of = {s: r for r, stages in enumerate(schedule.stage_of_rank) for s in stages}
        self.made: dict[Message, float] = {}  # when the action that computes the message ended
        self.arrived: dict[Message, float] = {}  # when the receiving stage can use the message
        self.sent: dict[tuple[str, int], int] = {}  # messages by direction and sending stage
        self.read: dict[tuple[str, int], list[float]] = {}  # when the receiver first used each message
        self.link_free: dict[tuple[int, int], float] = {}  # when a link is idle, by the ranks at its ends

    def advance(self, rank: int) -> bool:
        """Run steps of a rank until one must wait for a message or a credit. Return whether any ran."""
        before = self.at[rank]
        while not self.done(rank) and self._do(rank, self.next(rank)):
            self.at[rank] += 1
        return self.at[rank] > before

    def done(self, rank: int) -> bool:
        """Return whether the rank has run all its actions and sent their messages."""
        return self.at[rank] == len(self.steps[rank])

    def next(self, rank: int) -> Step:
        """Return the rank's next step."""
        return self.steps[rank][self.at[rank]]

    def waits_for(self, rank: int) -> str:
        """Return, as text for an error message, what the rank's next step waits for: another action, or the receiver
        of its own message."""
        step = self.next(rank)
        if not isinstance(step, Action):
            return f"a credit: {self.credits} of its messages are sent and not read"
        return _name(next(need for need, time in self._needs(step) if time is None))

    def _do(self, rank: int, step: Step) -> bool:
        return self._run(rank, step) if isinstance(step, Action) else self._send(rank, step)

    def _run(self, rank: int, action: Action) -> bool:
        """Run an action, record its times and return True; return False, without effect, if a result that it reads is
        not yet available."""
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
        if (message := made_by(action)) is not None:
            self.made[message] = self.free[rank]
            if self._reader(message) == rank:
                self.arrived[message] = self.free[rank]
        return True

    def _needs(self, action: Action) -> list[tuple[Message, float | None]]:
        """Return the results that an action reads, each with the microsecond from which it is available; None
        if that is not yet known.
        """
        stage, m, last = action.stage, action.microbatch, self.schedule.stages - 1
        if action.kind == "F":
            before = ("F", stage - 1, m)
            return [(before, self.arrived.get(before))] if stage else []
        if action.kind == "W":
            return [(("B", stage, m), self.made.get(("B", stage, m)))]
        own, after = ("F", stage, m), ("B", stage + 1, m)
        answer = [(after, self.arrived.get(after))] if stage < last else []
        return [(own, self.made.get(own)), *answer]

    def _send(self, rank: int, message: Message) -> bool:
        """Send a message if another rank reads it, and return True; return False, without effect, if there is no credit
        for it yet."""
        half, stage, _ = message
        to = self._reader(message)
        if to is None or to == rank:
            return True
        before = self.sent.get((half, stage), 0)
        # With two credits, the third message (before = 2) waits for the first use of the first one.
        if self.credits is not None and before >= self.credits:
            read = self.read.get((half, stage), [])
            if len(read) <= before - self.credits:
                return False
            self.free[rank] = max(self.free[rank], read[before - self.credits])
        self.sent[half, stage] = before + 1
        times = self.times[stage]
        size = times.sends if half == "F" else times.returns
        ends = (rank, to)
        self.link_free[ends] = max(self.free[rank], self.link_free.get(ends, 0.0)) + self.link.occupied(size)
        self.arrived[message] = self.link_free[ends] + self.link.latency
        return True

    def _reader(self, message: Message) -> int | None:
        """Return the rank of the stage that reads a message; None if no stage reads it."""
        half, stage, _ = message
        return self.rank_of.get(stage + 1 if half == "F" else stage - 1)


def _name(step: Step) -> str:
    """Return an action, or the action that makes a message, as text for an error message."""
    if isinstance(step, Action):
        return str(step)
    kind, stage, microbatch = step
    return f"{stage}{kind}{microbatch}"
