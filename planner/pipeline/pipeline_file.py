"""A planned pipeline, and its file format ``rematplan.pipeline/1``: plain data that can be read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from rematplan.ir import ProblemError, show_bytes
from rematplan.ir.files import read_as, write_whole
from rematplan.planner.pipeline.actions import (
    DROPS,
    KEEPS,
    RECEIVES,
    SENDS,
    PipelineSchedule,
    schedule_of_rows,
)
from rematplan.planner.pipeline.bubble_formulas import FORMULAS
from rematplan.planner.pipeline.json_fields import (
    field_of,
    json_list,
    json_object,
    list_of,
    number,
    shown,
    text,
    whole,
)
from rematplan.planner.pipeline.messages import CHANNELS, least_credits
from rematplan.planner.pipeline.rank_memory import rank_peak, stages_in_flight
from rematplan.planner.pipeline.stage_plan import (
    ActionTimes,
    HeldBytes,
    MessageBytes,
    StagePlan,
    StandingBytes,
    TransientBytes,
)
from rematplan.planner.pipeline.timeline import Link, StageTimes, Timeline, replay

PIPELINE_FORMAT = "rematplan.pipeline/1"
GROUPS: Mapping[str, type[Any]] = {
    "held": HeldBytes,
    "transients": TransientBytes,
    "messages": MessageBytes,
    "standing": StandingBytes,
    "times": ActionTimes,
}
"""The fields of a `StagePlan` whose own fields are keys of a stage's plan in a file."""
KEYS = {
    ("held", "kept"): "kept_bytes",
    ("held", "deferred"): "deferred_bytes",
    ("transients", "forward"): "transient_forward",
    ("transients", "backward"): "transient_backward",
    ("transients", "weight"): "transient_weight",
}
"""The keys of those fields whose keys are not their names."""


@dataclass(frozen=True)
class PlannedPipeline:
    """A planned pipeline: its schedule, its cuts, and the plans of its stages."""

    problem: str
    """The name of the planning problem of the whole step."""
    schedule: PipelineSchedule
    budget: int
    """Bytes of memory for each rank."""
    cuts: tuple[int, ...]
    """The blocks at which the second and each later stage begin."""
    stages: tuple[StagePlan, ...]
    times: tuple[StageTimes, ...]
    link: Link
    overhead: float
    """Microseconds that each action takes in addition to the computation."""
    floors: tuple[float, ...]
    """For each rank, with these cuts, a lower bound of the microseconds that its stages recompute per micro-batch."""
    floor: float
    """For any cuts, a lower bound of the slowest stage's or link's microseconds per micro-batch."""
    names: tuple[str, ...] = ()
    """The modules or ops with which the second and each later stage begin."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """How the model was loaded."""

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated start and end of each action. A dataflow schedule has `least_credits` credits per
        neighbour, others have no limit.
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
        """For each stage, the most micro-batches in flight at once: between the start of F and the end of B or I."""
        return stages_in_flight(self.schedule)

    @property
    def slowest(self) -> int:
        """The number of the stage that takes the most time for one micro-batch."""
        return max(range(len(self.times)), key=lambda s: self.times[s].total)

    @property
    def ideal_bubble(self) -> float:
        """The bubble (0 to 1) by the schedule's formula in `FORMULAS`: for stages of equal time and messages
        of none.
        """
        order = self.schedule
        return FORMULAS[order.name].bubble(order.ranks, order.microbatches, order.stages // order.ranks)


def pipeline_to_json(plan: PlannedPipeline) -> dict[str, Any]:
    """Return the pipeline as JSON data. Peaks, the makespan and the bubble are included for people;
    `pipeline_from_json` does not read them."""
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
        "plans": [stage_plan_to_json(one) for one in plan.stages],
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
    not read, but computed again. `ProblemError` if a field is missing or malformed, parts contradict each other, or a
    peak exceeds the budget."""
    if not isinstance(data, dict) or data.get("format") != PIPELINE_FORMAT:
        raise ProblemError(f"not a {PIPELINE_FORMAT} file; rematplan pipeline -o writes one")
    rows = field_of(data, "actions", list_of(list_of(_entry)))
    messages = field_of(data, "messages", list_of(list_of(_message)))
    if len(messages) != len(rows):
        raise ProblemError(f"messages has {len(messages)} lists, but there are actions of {len(rows)} ranks")
    schedule = schedule_of_rows(
        field_of(data, "schedule", _schedule_name),
        field_of(data, "stages", whole),
        field_of(data, "microbatches", whole),
        [_with_messages(row, own) for row, own in zip(rows, messages, strict=True)],
    )
    for name, value in (("ranks", schedule.ranks), ("stage_of_rank", [*map(list, schedule.stage_of_rank)])):
        if (stated := field_of(data, name, lambda one: one)) != value:
            raise ProblemError(f"{name} is {str(stated)[:40]!r}, but by the actions it is {value}")
    plan = PlannedPipeline(
        problem=field_of(data, "problem", text),
        schedule=schedule,
        budget=field_of(data, "budget", whole),
        cuts=tuple(field_of(data, "cuts", list_of(whole))),
        stages=tuple(field_of(data, "plans", list_of(_stage_plan))),
        times=tuple(field_of(data, "times", list_of(_stage_times))),
        link=field_of(data, "link", _link),
        overhead=field_of(data, "overhead", number),
        floors=tuple(field_of(data, "floors", list_of(number))),
        floor=field_of(data, "floor", lambda floor: math.inf if floor is None else number(floor)),
        names=tuple(field_of(data, "names", list_of(text))),
        model=field_of(data, "model", json_object),
    )
    _check_stages(plan)
    for rank, peak in enumerate(plan.peaks):
        if peak > plan.budget:
            raise ProblemError(
                f"rank {rank} has a peak of {show_bytes(peak)}, above its budget, {show_bytes(plan.budget)}"
            )
    return plan


def _entry(value: object) -> tuple[str, int, int]:
    kind, stage, microbatch = json_list(value)
    return text(kind), whole(stage), whole(microbatch)


def _message(value: object) -> tuple[int, tuple[str, int, int]]:
    position, *entry = json_list(value)
    kind, stage, microbatch = _entry(entry)
    if kind not in (*RECEIVES, *SENDS, *KEEPS, *DROPS):
        raise ValueError(f"{kind[:40]!r} is no kind of entry of messages")
    return whole(position), (kind, stage, microbatch)


def _schedule_name(value: object) -> str:
    if value not in tuple(FORMULAS):
        raise ValueError(f"{shown(value)} is unknown; known: {', '.join(FORMULAS)}")
    return str(value)


def _link(value: object) -> Link:
    """Read a link; a bandwidth of None counts as infinite. `ProblemError` or `TypeError` if a field is missing or no
    number from 0 on, `ValueError` if the bandwidth is 0."""
    link = json_object(value)

    def speed(bandwidth: object) -> float:
        return math.inf if bandwidth is None else number(bandwidth)

    found = Link(field_of(link, "latency", number), field_of(link, "bandwidth", speed))
    if not found.bandwidth:
        raise ValueError("bandwidth is 0")
    return found


def _with_messages(
    row: list[tuple[str, int, int]], entries: Sequence[tuple[int, tuple[str, int, int]]]
) -> list[tuple[str, int, int]]:
    """Return a rank's actions with the message entries between them. ``entries``: each with the position of the action
    that it precedes. `ProblemError` if a position is too large, or the rank does not run an entry's stage and
    micro-batch."""
    own = {action[1:] for action in row}
    before: dict[int, list[tuple[str, int, int]]] = {}
    for position, entry in entries:
        if position > len(row):
            raise ProblemError(f"messages has the position {position} in a rank of {len(row)} actions")
        if entry[1:] not in own:
            raise ProblemError(
                f"messages has {entry[0]} for stage {entry[1]}, micro-batch {entry[2]}, which its rank does not run"
            )
        before.setdefault(position, []).append(entry)
    found = [entry for at, action in enumerate(row) for entry in (*before.get(at, ()), action)]
    return [*found, *before.get(len(row), ())]


def _check_stages(plan: PlannedPipeline) -> None:
    """Raise `ProblemError` unless a pipeline has as many plans, times, cuts, names and floors as its stages and ranks
    need. Names must differ, cuts ascend, and plans be in order."""
    stages, ranks = plan.schedule.stages, plan.schedule.ranks
    if not len(plan.stages) == len(plan.times) == stages == len(plan.cuts) + 1:
        raise ProblemError(f"{stages} stages need as many plans and times, and one cut fewer")
    if len(plan.names) != len(plan.cuts) or len(set(plan.names)) != len(plan.names):
        raise ProblemError(f"{len(plan.cuts)} cuts need as many names, all different")
    if len(plan.floors) != ranks:
        raise ProblemError(f"{ranks} ranks need as many floors, not {len(plan.floors)}")
    for at, (one, other) in enumerate(pairwise((0, *plan.cuts))):
        if other <= one:
            raise ProblemError(f"cut {at} is at block {other}, not after block {one}: cuts must ascend")
    for at, stage in enumerate(plan.stages):
        if stage.stage != at:
            raise ProblemError(f"plan {at} is of stage {stage.stage}; plans must be in the stages' order")


def stage_plan_to_json(plan: StagePlan) -> dict[str, Any]:
    """Return the memory and times of a stage and its plan as JSON data."""
    groups = {group: asdict(getattr(plan, group)) for group in GROUPS}
    flat = {KEYS.get((group, name), name): v for group, own in groups.items() for name, v in own.items()}
    return {"stage": plan.stage, **flat, "plan": plan.plan}


def _stage_plan(value: object) -> StagePlan:
    """Read a stage's memory, times and plan. `ProblemError`, `TypeError` or `ValueError` if a key is missing or
    unknown, or a value has another type."""
    row = json_object(value)
    keys = {
        group: {KEYS.get((group, one.name), one.name): one for one in fields(kind)}
        for group, kind in GROUPS.items()
    }
    _check_known(row, {"stage", "plan", *(key for own in keys.values() for key in own)})
    groups = {group: GROUPS[group](**_numbers(row, own)) for group, own in keys.items()}
    return StagePlan(field_of(row, "stage", whole), plan=field_of(row, "plan", _plan), **groups)


def _stage_times(value: object) -> StageTimes:
    row, keys = json_object(value), {one.name: one for one in fields(StageTimes)}
    _check_known(row, keys.keys())
    return StageTimes(**_numbers(row, keys))


def _check_known(row: Mapping[str, Any], known: Set[str]) -> None:
    if unknown := sorted(row.keys() - known):
        raise ValueError(f"{unknown[0][:40]!r} is unknown")


def _numbers(row: Mapping[str, Any], keys: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """Read the numbers of a JSON object. ``keys``: the field of a dataclass that each key states."""
    return {one.name: field_of(row, key, _reader(str(one.type))) for key, one in keys.items()}


def _reader(kind: str) -> Callable[[Any], Any]:
    """Return the function that reads a number whose type is ``kind``, as text."""
    read: Callable[[Any], Any] = whole if "int" in kind else number
    return (lambda value: None if value is None else read(value)) if "None" in kind else read


def _plan(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    plan = json_object(value)
    field_of(plan, "steps", list_of(_step))
    return plan


def _step(value: object) -> tuple[str, str]:
    action, name = json_list(value)
    return text(action), text(name)


def save_pipeline(plan: PlannedPipeline, path: str | Path) -> None:
    """Write a pipeline as a JSON file, completely or not at all."""
    write_whole(path, json.dumps(pipeline_to_json(plan)))


def load_pipeline(path: str | Path) -> PlannedPipeline:
    """Read a pipeline file; `ProblemError`, which names it, if that is impossible."""
    return read_as(path, pipeline_from_json)
