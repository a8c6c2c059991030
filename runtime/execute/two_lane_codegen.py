"""Code generation for two lanes (threads on the CPU, streams on CUDA).

From the fork on, an inner function has the ops of the recovery lane, which runs in a second thread. Each lane has
its own variables; a tensor that changes lanes passes in a variable ``h_...``, which the reading lane deletes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock

from rematplan.planner.core.lane_schedule import (
    BEFORE,
    MAIN,
    RECOVERY,
    Copy,
    Lanes,
    Needs,
    Placed,
    check_needs,
    copies_of,
    data_needs,
    later_draws,
    needs_of,
    placed,
)
from rematplan.planner.core.schedule import Run, Schedule, runs_of
from rematplan.runtime.execute.codegen import Writer
from rematplan.runtime.execute.lanes import stream_recorder, two_lanes
from rematplan.runtime.execute.missing_tangents import Unused
from rematplan.runtime.graph.captured_step import CapturedStep

LANE = ("gradients", "recovery")
"""The names of the lanes in the source."""

DRAWS = Lock()
"""A lock for random calls on two lanes. While one lane replays a random call, the generator has an earlier state, which
the other lane must not use."""


@dataclass
class _Stretch:
    """What each lane does in one generated function. A copy is a tensor as one op execution computed it."""

    where: Placed
    """The op executions of each lane."""
    copies: list[Copy]
    """The copies that are computed or read in this part."""
    needs: Needs
    """For each lane and op execution, how many op executions of the other lane must have finished before."""
    takes: dict[tuple[int, int], list[Copy]] = field(default_factory=lambda: defaultdict(list))
    """By lane and index of an op execution, the copies that the lane takes over from the other before it."""
    gives: dict[tuple[int, int], list[Copy]] = field(default_factory=lambda: defaultdict(list))
    """By lane and index of an op execution, the copies that the lane hands over after it."""
    drops: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    """By lane and index of an op execution, the storages whose variables the lane deletes after it."""
    handed: dict[int, dict[str, str]] = field(default_factory=dict)
    """By the ``id`` of a copy that is handed over: its values, and the variables in which they are passed."""

    def __post_init__(self) -> None:
        """Fill ``takes``, ``gives`` and ``drops`` from ``copies``. A lane takes a copy of the other before its first
        read, and each lane drops a copy after its last. A lane that computes a copy and never reads it drops it at
        once."""
        for copy in self.copies:
            if (reader := copy.first[1 - copy.lane]) is not None:
                self.gives[copy.lane, copy.made].append(copy)
                self.takes[1 - copy.lane, reader].append(copy)
            for lane in (MAIN, RECOVERY):
                end = copy.made if copy.lane == lane and copy.last[lane] is None else copy.last[lane]
                if end is not None:
                    self.drops[lane, end].append(copy.tensor)

    @property
    def kept(self) -> set[str]:
        """The storages that exist before this part of the schedule and that the main lane reads in it or afterwards."""
        return {c.tensor for c in self.copies if c.made == BEFORE and c.last[MAIN] is not None}

    def awaited(self, lane: int) -> set[int]:
        """Return for which numbers of finished op executions of ``lane`` the other lane waits."""
        other = 1 - lane
        return set(self.needs[other][: len(self.where.lanes[other])])


class LaneWriter(Writer):
    """Writes a schedule as source for two lanes from the fork on, but not before position ``start``; earlier ops run
    one after the other. Each function begins and ends in the main lane. Writing raises `ProblemError` if the lanes do
    not fit the schedule."""

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        lanes: Lanes,
        start: int,
        unused: Unused,
        overwrite: bool,
    ) -> None:
        super().__init__(step, schedule, unused=unused, overwrite=overwrite)
        self.runs, self.lanes = runs_of(schedule), lanes
        self.where = placed(lanes.fork, lanes.recovery, len(self.runs))
        self.step_of = [k for k, one in enumerate(schedule) if isinstance(one, Run)]
        self.start = max(start, [*self.step_of, len(schedule)][lanes.fork])

    def steps(self, start: int, end: int) -> None:
        """Write the positions ``start`` to ``end`` (exclusive) of the schedule, on two lanes from the fork on."""
        if start < self.start:
            super().steps(start, min(end, self.start))
        if end > self.start:
            self._write(self._stretch(max(start, self.start), end))

    @cached_property
    def _touches(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        calls = [self.step.call[name] for name in self.runs]
        return [(self.step.reads(call), self.step.writes(call)) for call in calls]

    @cached_property
    def _inputs(self) -> set[str]:
        return {*self.step.given()}

    def _stretch(self, start: int, end: int) -> _Stretch:
        """Return what each lane does at positions ``start`` to ``end`` (exclusive). Tensors that are read later or
        returned pass to the main lane. Raises `ProblemError` if the lanes' waits do not suffice."""
        first, last = bisect_left(self.step_of, start), bisect_left(self.step_of, end)
        wanted = dict.fromkeys(self.step.returned())
        for reads, writes in reversed(self._touches[last:]):
            wanted = {t: None for t in wanted if t not in writes} | dict.fromkeys(reads)
        where = placed(first, (at for at in self.where.recovery if first <= at < last), last)
        copies = copies_of(self._touches[:last], where, self._inputs, wanted)
        needs = needs_of(
            where, [(at, other) for at, other in self.lanes.waits if first <= other and at < last]
        )
        draws = later_draws(self.runs[:last], (c.name for c in self.step.calls if c.seeded))
        later = {at: first for at, first in draws.items() if at in where.where}
        check_needs(where, needs, data_needs(where, copies, later))
        return _Stretch(where, copies, needs)

    def _write(self, here: _Stretch) -> None:
        """Write the code of one stretch of the schedule: of the main lane, and of a function for the recovery lane if
        that has runs."""
        for copy in filter(Copy.crosses, here.copies):
            for runs, last in zip(here.where.lanes, copy.last, strict=True):
                # A tensor that both lanes read must not be overwritten in place.
                if last is not None and last < len(runs):
                    self.overwriting.pop(self.step_of[runs[last]], None)
        for copy in here.gives[MAIN, BEFORE]:
            self._give(self, here, copy)
        for storage in list(self.alive):
            if storage not in here.kept and storage not in self._inputs:
                self.free(storage)
        self.drop_dead()
        if not here.where.recovery:
            self._lane(self, here, MAIN)
            return
        inner = self._inner_writer()
        before, self.lines = self.lines, []
        self._lane(self, here, MAIN)
        on_main, self.lines = self.lines, []
        self._lane(inner, here, RECOVERY)
        hands = [hand for values in here.handed.values() for hand in values.values()] + inner.gone
        self.scope["two_lanes"] = partial(two_lanes, self.step.device)
        self.lines = [
            *before,
            f"{', '.join(LANE)} = two_lanes()",
            "def recover():",
            *_indented([f"nonlocal {', '.join(hands)}"] if hands else []),
            *_indented(inner.lines),
            f"with {LANE[RECOVERY]}.running(recover):",
            *_indented(on_main or ["pass"]),
        ]
        self._take(self, here, MAIN, len(here.where.main))

    def _inner_writer(self) -> Writer:
        """Return a writer for the recovery lane's inner function, which shares the step's inputs and saved random
        states, but no other variables."""
        inner = Writer(self.step, self.schedule)
        inner.scope, inner.targets = self.scope, self.targets
        inner.variable, inner.taken = self.variable, self.taken
        inner.states, inner.last_draws = self.states, self.last_draws
        inner.overwriting = self.overwriting
        inner.take([i.value for i in self.step.inputs])
        return inner

    def _lane(self, writer: Writer, here: _Stretch, lane: int) -> None:
        """Write the op executions of one lane, with its waits, the tensors that it passes to and takes from the other
        lane, and its deletions."""
        awaited, had = here.awaited(lane), 0
        for k, at in enumerate(here.where.lanes[lane]):
            if here.needs[lane][k] > had:
                had = here.needs[lane][k]
                writer.lines.append(f"{LANE[1 - lane]}.wait({had})")
            self._take(writer, here, lane, k)
            self._run(writer, here, at)
            for copy in here.gives[lane, k]:
                self._give(writer, here, copy)
            ends = self.ends.get(self.step_of[at], ()) if lane == MAIN else ()
            for storage in (*here.drops[lane, k], *ends):
                writer.free(storage)
            writer.drop_dead()
            if k + 1 in awaited:
                writer.lines.append(f"{LANE[lane]}.reached({k + 1})")

    def _run(self, writer: Writer, here: _Stretch, at: int) -> None:
        """Write one op execution, enclosed in a lock if the op is random and both lanes run. ``at``: its index."""
        before = len(writer.lines)
        writer.run(Run(self.runs[at]), self.step_of[at])
        if here.where.recovery and self.step.call[self.runs[at]].seeded:
            writer.scope["draws"] = DRAWS
            writer.lines[before:] = ["with draws:", *_indented(writer.lines[before:])]

    def _give(self, writer: Writer, here: _Stretch, copy: Copy) -> None:
        writer.lines += [f"{hand} = {writer.use(v)}" for v, hand in self._hands(here, copy).items()]

    def _take(self, writer: Writer, here: _Stretch, lane: int, index: int) -> None:
        """Write lines in which a lane takes over the tensors that it reads first in its op execution ``index``."""
        for copy in here.takes[lane, index]:
            for value, hand in self._hands(here, copy).items():
                name = writer.name(value)
                writer.lines += [f"{name} = {hand}", f"del {hand}"]
                if self.step.device.type == "cuda":
                    writer.scope["record_stream"] = stream_recorder(self.step.device)
                    writer.lines.append(f"record_stream({name})")
                writer.mark_alive(value)

    def _hands(self, here: _Stretch, copy: Copy) -> dict[str, str]:
        """Return the variables that pass a copy from one lane to the other, by value. Views are left out: each lane
        computes its own views."""
        if id(copy) not in here.handed:
            number, step = len(here.handed), self.step
            at = here.where.lanes[copy.lane][copy.made] if copy.made > BEFORE else None
            made = self.alive[copy.tensor] if at is None else step.call[self.runs[at]].results
            own = [v for v in made if v and step.values[v].storage == copy.tensor and not self.is_view(v)]
            here.handed[id(copy)] = {v: f"h_{number}_{self.name(v)}" for v in own}
        return here.handed[id(copy)]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
