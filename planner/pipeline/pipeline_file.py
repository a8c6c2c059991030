"""A planned pipeline, and its file format ``rematplan.pipeline/1``: plain data that can be read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from rematplan.ir import ProblemError, show_bytes
from rematplan.ir.problem_json import read_json, write_whole
from rematplan.planner.pipeline.actions import (
    DROPS,
    KEEPS,
    RECEIVES,
    SENDS,
    PipelineSchedule,
    StagePlan,
    schedule_of_rows,
)
from rematplan.planner.pipeline.bubble_formulas import FORMULAS
from rematplan.planner.pipeline.messages import CHANNELS, least_credits
from rematplan.planner.pipeline.rank_memory import in_flight, rank_peak
from rematplan.planner.pipeline.timeline import Link, StageTimes, Timeline, replay

PIPELINE_FORMAT = "rematplan.pipeline/1"
LARGEST = 2**62
"""A bound of all numbers of a file: of bytes, microseconds and counts."""
Record = TypeVar("Record", StagePlan, StageTimes)


@dataclass(frozen=True)
class StageOp:
    """Facts about an op of a stage, by which the same op is found in another capture of the stage.

    ``name``: the op's name in the plan. ``op``: the ATen op as text. ``backward``: whether it belongs to the backward.
    ``loss``: whether it belongs to the loss, which is outside of the model. ``reads``: the names of the stage's ops
    whose results it reads, sorted. ``writes``: the bytes of its results, ascending.
    """

    name: str
    op: str
    backward: bool
    loss: bool
    reads: tuple[str, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class PlannedPipeline:
    """A planned pipeline: its schedule, its cuts, and the plans of its stages.

    ``problem``: the name of the planning problem of the whole step. ``schedule``: the actions of each rank. ``budget``:
    bytes of memory for each rank. ``cuts``: the blocks at which the second and each later stage begin. ``stages``: the
    memory, times and plan of each stage. ``times``: the times and message sizes of each stage. ``link``: latency and
    bandwidth between ranks. ``overhead``: microseconds that each action takes in addition to the computation.
    ``floors``: for each rank, with these cuts, a lower bound of the microseconds that its stages recompute for one
    micro-batch. ``floor``: for any cuts, a lower bound of the microseconds that the slowest stage or link takes for one
    micro-batch. ``names``: the modules or ops with which the second and each later stage begin. ``model``: how the
    model was loaded, so that it can be loaded again. ``ops``: the ops of each stage, in the order of the captured step;
    empty if they are unknown, so that the plans can only be shown.
    """

    problem: str
    schedule: PipelineSchedule
    budget: int
    cuts: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    times: tuple[StageTimes, ...]
    link: Link
    overhead: float
    floors: tuple[float, ...]
    floor: float
    names: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    ops: tuple[tuple[StageOp, ...], ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated start and end of every action.

        In a dataflow schedule, at most `least_credits` messages from one stage to a neighbour may be sent and not yet
        read; the stage waits before it sends more. Other schedules have no such limit.
        """
        credits = least_credits(self.schedule) if self.schedule.name in CHANNELS else None
        return replay(self.schedule, self.times, self.link, self.overhead, credits)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """For each rank, the largest number of bytes that it holds at any moment of a step."""
        own = ([self.stages[s] for s in stages] for stages in self.schedule.stage_of_rank)
        return tuple(rank_peak(row, plans) for row, plans in zip(self.schedule.actions, own, strict=True))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the largest number of micro-batches that are in flight at once: from the start of a forward
        (F) to the end of its backward (B), or of the part of its backward that computes the input's gradient (I)."""
        return most_in_flight(self.schedule)

    @property
    def slowest(self) -> int:
        """The number of the stage that takes the most time for one micro-batch."""
        return max(range(len(self.times)), key=lambda s: self.times[s].total)

    @property
    def ideal_bubble(self) -> float:
        """The share (0 to 1) of time in which ranks would not work if all stages took equal time and messages took
        none. It is computed by the formula that is known for the schedule (`FORMULAS`)."""
        order = self.schedule
        return FORMULAS[order.name].bubble(order.ranks, order.microbatches, order.stages // order.ranks)


def most_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return, for each stage, the largest number of micro-batches that are in flight at once.

    A micro-batch is in flight from the start of its forward (F) to the end of its backward (B), or of the part of its
    backward that computes the input's gradient (I).
    """
    most = {stage: n for row in schedule.actions for stage, n in in_flight(row).items()}
    return tuple(most[stage] for stage in range(schedule.stages))


def pipeline_to_json(plan: PlannedPipeline) -> dict[str, Any]:
    """Return the pipeline as JSON data in the format ``rematplan.pipeline/1``.

    For people and other programs, the data also contains results such as peaks and makespan. `pipeline_from_json`
    ignores these and computes them again.
    """
    order, line = plan.schedule, plan.timeline
    return {
        "format": PIPELINE_FORMAT,
        "problem": plan.problem,
        "model": dict(plan.model),
        "schedule": order.name,
        "stages": order.stages,
        "ranks": order.ranks,
        "microbatches": order.microbatches,
        "actions": [[[a.kind, a.stage, a.microbatch] for a in row] for row in order.actions],
        "stage_of_rank": [list(stages) for stages in order.stage_of_rank],
        "messages": [
            [[position, *entry] for position, a in enumerate(row) for entry in a.messages]
            + [[len(row), *entry] for a in row for entry in a.after]
            for row in order.actions
        ],
        "cuts": list(plan.cuts),
        "names": list(plan.names),
        "budget": plan.budget,
        "link": {
            "latency": plan.link.latency,
            "bandwidth": plan.link.bandwidth if math.isfinite(plan.link.bandwidth) else None,
        },
        "overhead": plan.overhead,
        "times": [asdict(one) for one in plan.times],
        "plans": [asdict(one) for one in plan.stages],
        "ops": [
            [[o.name, o.op, o.backward, o.loss, list(o.reads), list(o.writes)] for o in ops]
            for ops in plan.ops
        ],
        "floor": plan.floor if math.isfinite(plan.floor) else None,
        "floors": list(plan.floors),
        "in_flight": list(plan.in_flight),
        "peaks": list(plan.peaks),
        "makespan": line.makespan,
        "bubble": line.bubble,
        "slowest": plan.slowest,
    }


def pipeline_from_json(data: object) -> PlannedPipeline:
    """Build a planned pipeline from JSON data in the format that `pipeline_to_json` writes. Peaks and the timeline are
    not read, but computed again.

    Raises:
        ProblemError: the data does not have the format, its actions are not a valid schedule, or a rank exceeds the
            budget.
    """
    if not isinstance(data, dict) or data.get("format") != PIPELINE_FORMAT:
        raise ProblemError(f"not a {PIPELINE_FORMAT} file")
    try:
        rows = [
            _with_messages([_entry(*one) for one in row], entries)
            for row, entries in zip(data["actions"], data["messages"], strict=True)
        ]
        schedule = schedule_of_rows(
            _text(data["schedule"], "schedule"),
            _whole(data["stages"], "stages"),
            _whole(data["microbatches"], "microbatches"),
            rows,
        )
        if data["ranks"] != schedule.ranks:
            raise ProblemError(f"ranks is {data['ranks']!r}, but there are actions of {schedule.ranks} ranks")
        if schedule.name not in FORMULAS:
            raise ProblemError(f"unknown schedule {schedule.name!r}; known: {', '.join(FORMULAS)}")
        latency, bandwidth = data["link"]["latency"], data["link"]["bandwidth"]
        speed = math.inf if bandwidth is None else _number(bandwidth, "bandwidth")
        if not speed:
            raise ValueError("bandwidth is 0")
        plan = PlannedPipeline(
            problem=_text(data["problem"], "problem"),
            schedule=schedule,
            budget=_whole(data["budget"], "budget"),
            cuts=tuple(_whole(one, "a cut") for one in data["cuts"]),
            stages=tuple(_record(StagePlan, row) for row in data["plans"]),
            times=tuple(_record(StageTimes, row) for row in data["times"]),
            link=Link(_number(latency, "latency"), speed),
            overhead=_number(data["overhead"], "overhead"),
            floors=tuple(_number(one, "a floor") for one in data["floors"]),
            floor=math.inf if data["floor"] is None else _number(data["floor"], "floor"),
            names=tuple(_text(one, "a name") for one in data["names"]),
            model=dict(data["model"]),
            ops=tuple(tuple(_stage_op(*row) for row in rows) for rows in data["ops"]),
        )
        _check_stages(plan)
        peaks = plan.peaks
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProblemError(f"a field is missing or of another type: {error}") from None
    for rank, peak in enumerate(peaks):
        if peak > plan.budget:
            raise ProblemError(
                f"rank {rank} has a peak of {show_bytes(peak)}, above its budget, {show_bytes(plan.budget)}"
            )
    return plan


def _entry(kind: object, stage: object, microbatch: object) -> tuple[str, int, int]:
    return _text(kind, "a kind"), _whole(stage, "a stage"), _whole(microbatch, "a micro-batch")


def _stage_op(
    name: object, op: object, backward: object, loss: object, reads: list[object], writes: list[object]
) -> StageOp:
    return StageOp(
        _text(name, "an op's name"),
        _text(op, "an op"),
        bool(backward),
        bool(loss),
        tuple(_text(one, "an op's name") for one in reads),
        tuple(_whole(one, "a result") for one in writes),
    )


def _with_messages(row: list[tuple[str, int, int]], entries: list[Any]) -> list[tuple[str, int, int]]:
    """Return a rank's actions with the entries of messages between them, as `schedule_of_rows` takes them.

    ``entries``: for each of these the position of the action before which it happens (the number of actions, if it
    happens after the last one), and the entry.

    Raises:
        ValueError: a position is too large, or an entry has no kind of `RECEIVES`, `SENDS`, `KEEPS` or `DROPS`.
    """
    before: dict[int, list[tuple[str, int, int]]] = {}
    for position, *stated in entries:
        entry = _entry(*stated)
        if entry[0] not in (*RECEIVES, *SENDS, *KEEPS, *DROPS) or _whole(position, "a position") > len(row):
            raise ValueError(f"an entry of messages is {[position, *stated]}")
        before.setdefault(position, []).append(entry)
    found = [entry for at, action in enumerate(row) for entry in (*before.get(at, ()), action)]
    return [*found, *before.get(len(row), ())]


def _check_stages(plan: PlannedPipeline) -> None:
    """Check that a pipeline has a plan and times for each stage, ops for each or none, a floor for each rank, and a
    named cut before each stage but the first.

    Raises:
        ProblemError: one is missing or too many, or the cuts, their names or the plans are not in the stages' order.
    """
    stages, ranks = plan.schedule.stages, plan.schedule.ranks
    if not len(plan.stages) == len(plan.times) == stages == len(plan.cuts) + 1:
        raise ProblemError(f"{stages} stages need as many plans and times, and one cut fewer")
    if len(plan.names) != len(plan.cuts) or len(set(plan.names)) != len(plan.names):
        raise ProblemError(f"{len(plan.cuts)} cuts need as many names, all different")
    if len(plan.ops) not in (0, stages):
        raise ProblemError(f"{stages} stages need as many lists of ops, not {len(plan.ops)}")
    if len(plan.floors) != ranks:
        raise ProblemError(f"{ranks} ranks need as many floors, not {len(plan.floors)}")
    for number, (one, other) in enumerate(pairwise((0, *plan.cuts))):
        if other <= one:
            raise ProblemError(f"cut {number} is at block {other}, not after block {one}: cuts must ascend")
    for number, stage in enumerate(plan.stages):
        if stage.stage != number:
            raise ProblemError(f"plan {number} is of stage {stage.stage}; plans must be in the stages' order")


def _record(kind: type[Record], row: Mapping[str, Any]) -> Record:
    """Build a `StagePlan` or `StageTimes` (``kind``) from JSON data, whose keys are the names of its fields.

    Raises:
        TypeError: a field is missing or unknown, a number of bytes is not whole, or a plan has no steps.
        ValueError: a number is negative, infinite or too large, or a plan's step is no pair.
    """
    made = kind(**row)
    for one in fields(made):
        value = getattr(made, one.name)
        if value is None and "None" in str(one.type):
            continue
        if one.name == "plan":
            for action, name in value["steps"]:
                _text(action, "a plan's step")
                _text(name, "a plan's step")
        else:
            (_whole if "int" in str(one.type) else _number)(value, one.name)
    return made


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    _number(value, name)
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    if not 0 <= value < LARGEST:
        raise ValueError(f"{name} is {str(value)[:40]}, not from 0 to {LARGEST:.0e}")
    return float(value)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value


def save_pipeline(plan: PlannedPipeline, path: str | Path) -> None:
    """Write a pipeline as a JSON file, completely or not at all."""
    write_whole(path, json.dumps(pipeline_to_json(plan)))


def load_pipeline(path: str | Path) -> PlannedPipeline:
    """Read a pipeline file.

    Raises:
        ProblemError: the file cannot be read, or a reason that `pipeline_from_json` lists. The message names the
            file.
    """
    try:
        return pipeline_from_json(read_json(path))
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None
