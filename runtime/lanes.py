"""A plan on two lanes as one generated function with another inside, the recovery lane's.

Each lane has variables of its own, and drops a tensor when it has read it for the last time; that is gone when both
have. What one lane makes and the other reads is handed over in variables ``h_...``, which the other lane empties.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from threading import Lock

from rematplan.planner.lanes import (
    BEFORE,
    MAIN,
    RECOVERY,
    Copy,
    Lanes,
    check_needs,
    copies_of,
    data_needs,
    later_draws,
    needs_of,
    placed,
)
from rematplan.planner.schedule import Run, Schedule, runs_of
from rematplan.runtime.captured_step import CapturedStep
from rematplan.runtime.executor import Executable, check_order_of_draws, defined
from rematplan.runtime.lane_threads import taken, two_lanes
from rematplan.runtime.step_writer import Writer

LANE = ("gradients", "recovery")
"""The lanes in the source."""


def compile_lanes(step: CapturedStep, schedule: Schedule, lanes: Lanes) -> Executable:
    """Compile a schedule that runs on two lanes. Results are those of the schedule on one lane, bit by bit.

    Raises:
        ProblemError: as `compile_step`; or the lanes do not fit the schedule, or do not wait for what they read.
    """
    check_order_of_draws(step, schedule)
    writer = _Lanes(step, schedule, lanes)
    source = writer.write()
    return Executable(source, defined(step, source, writer.main.scope)["step"])


class _OneAtATime(Writer):
    """Of two lanes only one draws random numbers at a time: a replay sets the generator back, and on again."""

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        super().__init__(step, schedule)
        self.overwriting = {}  # what one lane reads for the last time the other may be reading

    def run(self, run: Run, at: int) -> None:
        """As a writer does, but a random op with the lock in its hands."""
        before = len(self.lines)
        super().run(run, at)
        if self.step.call[run.op].seeded:
            self.scope["draws"] = Lock()
            self.lines[before:] = ["with draws:", *_indented(self.lines[before:])]


class _Lanes:
    """Writes the two functions."""

    def __init__(self, step: CapturedStep, schedule: Schedule, lanes: Lanes) -> None:
        self.step, self.schedule = step, schedule
        self.runs = runs_of(schedule)
        self.where = placed(lanes.fork, lanes.recovery, len(self.runs))
        self.inputs = {step.values[i.value].storage for i in step.inputs}
        outputs = dict.fromkeys(step.values[o.value].storage for o in step.outputs)
        calls = [step.call[name] for name in self.runs]
        touches = [(step.reads(call), step.writes(call)) for call in calls]
        self.copies = copies_of(touches, self.where, self.inputs, outputs)
        self.needs = needs_of(self.where, lanes.waits)
        draws = later_draws(self.runs, (c.name for c in step.calls if c.seeded))
        later = {at: first for at, first in draws.items() if at in self.where.where}
        check_needs(self.where, self.needs, data_needs(self.where, self.copies, later))
        self.main: Writer = _OneAtATime(step, schedule)
        self.handed: dict[
            int, dict[str, str]
        ] = {}  # by copy: the variables in which its values are handed over
        self._sort_copies()

    def _sort_copies(self) -> None:
        """By lane and index of a run: the copies that the lane takes before it, gives and drops after it."""
        self.takes: dict[tuple[int, int], list[Copy]] = defaultdict(list)
        self.gives: dict[tuple[int, int], list[Copy]] = defaultdict(list)
        self.drops: dict[tuple[int, int], list[str]] = defaultdict(list)
        for copy in self.copies:
            if (reader := copy.first[1 - copy.lane]) is not None:
                self.gives[copy.lane, copy.made].append(copy)
                self.takes[1 - copy.lane, reader].append(copy)
            for lane in (MAIN, RECOVERY):
                end = copy.made if copy.lane == lane and copy.last[lane] is None else copy.last[lane]
                if end is not None:
                    self.drops[lane, end].append(copy.tensor)

    def write(self) -> str:
        """The source of ``step(*inputs)``."""
        main, step = self.main, self.step
        names = main.take([i.value for i in step.inputs])
        main.steps(0, self._step_of(self.where.fork))
        self._fork()
        before, main.lines = main.lines, []
        beside = main.beside()
        self._lane(main, MAIN)
        on_main, main.lines = main.lines, []
        self._lane(beside, RECOVERY)
        self._take(main, MAIN, len(self.where.main))
        given = main.tuple_of([main.use(o.value) for o in step.outputs])
        main.scope["two_lanes"] = partial(two_lanes, step.device)
        main.lines = [
            *before,
            f"{', '.join(LANE)} = two_lanes()",
            "def recover():",
            *_indented(self._shared(beside.lines)),
            f"with {LANE[RECOVERY]}.running(recover):",
            *_indented(on_main or ["pass"]),
            *main.lines,
            f"return {given}",
        ]
        return main.function(f"step({names})")

    def _step_of(self, run: int) -> int:
        """The position in the schedule of a run."""
        at = [k for k, one in enumerate(self.schedule) if isinstance(one, Run)]
        return at[run] if run < len(at) else len(self.schedule)

    def _fork(self) -> None:
        """Hand over what recovery reads of what stands, and keep what the main lane reads."""
        main = self.main
        for copy in self.gives[MAIN, BEFORE]:
            self._give(main, copy)
        kept = {c.tensor for c in self.copies if c.made == BEFORE and c.last[MAIN] is not None}
        for storage in list(main.alive):
            if storage not in kept and storage not in self.inputs:
                main.free(storage)
        main.drop_dead()

    def _hands(self, copy: Copy) -> dict[str, str]:
        """The values of a copy that is handed over, by the variables in which they are."""
        if id(copy) not in self.handed:
            number, step = len(self.handed), self.step
            at = self.where.lanes[copy.lane][copy.made] if copy.made > BEFORE else None
            made = self.main.alive[copy.tensor] if at is None else step.call[self.runs[at]].results
            own = [v for v in made if v and step.values[v].storage == copy.tensor and not self._is_view(v)]
            self.handed[id(copy)] = {v: f"h_{number}_{self.main.name(v)}" for v in own}
        return self.handed[id(copy)]

    def _is_view(self, value: str) -> bool:
        call = self.step.values[value].call
        return call is not None and self.step.call[call].is_view

    def _lane(self, writer: Writer, lane: int) -> None:
        """The runs of one lane."""
        other = 1 - lane
        awaited = {count for count in self.needs[other][: len(self.where.lanes[other])] if count}
        had = 0
        for k, at in enumerate(self.where.lanes[lane]):
            if self.needs[lane][k] > had:
                had = self.needs[lane][k]
                writer.lines.append(f"{LANE[other]}.wait({had})")
            self._take(writer, lane, k)
            writer.run(Run(self.runs[at]), at)
            for copy in self.gives[lane, k]:
                self._give(writer, copy)
            for storage in self.drops[lane, k]:
                writer.free(storage)
            writer.drop_dead()
            if k + 1 in awaited:
                writer.lines.append(f"{LANE[lane]}.reached({k + 1})")

    def _give(self, writer: Writer, copy: Copy) -> None:
        writer.lines += [f"{hand} = {writer.use(v)}" for v, hand in self._hands(copy).items()]

    def _take(self, writer: Writer, lane: int, index: int) -> None:
        """Take over the copies that are read first by a run of this lane."""
        for copy in self.takes[lane, index]:
            for value, hand in self._hands(copy).items():
                name = writer.name(value)
                writer.lines += [f"{name} = {hand}", f"del {hand}"]
                if self.step.device.type == "cuda":
                    writer.scope["taken"] = taken(self.step.device)
                    writer.lines.append(f"taken({name})")
                writer.bring_to_life(value)

    def _shared(self, lines: list[str]) -> list[str]:
        """The recovery lane's lines, which change variables of the function that they stand in."""
        hands = sorted(h for values in self.handed.values() for h in values.values())
        return [*([f"nonlocal {', '.join(hands)}"] if hands else []), *(lines or ["pass"])]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
