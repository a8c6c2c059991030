"""A planned pipeline, its file in the format ``rematplan.pipeline/1``, and what a rank reads of that file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rematplan.ir import ProblemError
from rematplan.ir.files import field_of, names_of, read_as, typed, write_whole
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.bubble_formulas import FORMULAS
from rematplan.planner.pipeline.messages import CHANNELS, least_credits
from rematplan.planner.pipeline.rank_memory import rank_peak, stages_in_flight
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.timeline import Link, StageTimes, Timeline, replay

PIPELINE_FORMAT = "rematplan.pipeline/1"
GROUPS = ("held", "transients", "messages", "standing", "times")
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


@dataclass(frozen=True)
class StatedPipeline:
    """What a rank reads of the pipeline file that it runs. The rank captures and plans its stages itself."""

    problem: str
    schedule: str
    stages: int
    ranks: int
    microbatches: int
    in_flight: tuple[int, ...]
    """For each stage, the most micro-batches in flight; they make the schedule ``dataflow``."""
    budget: int
    """Bytes of memory for each rank."""
    names: tuple[str, ...]
    """The modules or ops with which the second and each later stage begin."""
    model: Mapping[str, Any]
    """How the model was loaded."""


def pipeline_to_json(plan: PlannedPipeline) -> dict[str, Any]:
    """Return the pipeline as JSON data."""
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


def pipeline_from_json(data: object) -> StatedPipeline:
    """Return what JSON data in the format of `pipeline_to_json` states for a rank. `ProblemError` if a field is missing
    or malformed, or the stages do not suit the ranks or the cuts."""
    if not isinstance(data, dict) or data.get("format") != PIPELINE_FORMAT:
        raise ProblemError(f"not a {PIPELINE_FORMAT} file; rematplan pipeline -o writes one")

    def stated(name: str, kind: type) -> Any:
        return field_of(data, name, kind, "the pipeline")

    found = StatedPipeline(
        problem=stated("problem", str),
        schedule=stated("schedule", str),
        stages=stated("stages", int),
        ranks=stated("ranks", int),
        microbatches=stated("microbatches", int),
        in_flight=tuple(typed(n, int, "in_flight") for n in stated("in_flight", list)),
        budget=stated("budget", int),
        names=names_of(stated("names", list), "names"),
        model=stated("model", dict),
    )
    if min(found.stages, found.microbatches) < 1:
        raise ProblemError(f"there are {found.stages} stages and {found.microbatches} micro-batches")
    if not len(found.in_flight) == len(found.names) + 1 == found.stages:
        raise ProblemError(f"{found.stages} stages need as many numbers in flight, and one name fewer")
    return found


def stage_plan_to_json(plan: StagePlan) -> dict[str, Any]:
    """Return the memory and times of a stage and its plan as JSON data."""
    groups = {group: asdict(getattr(plan, group)) for group in GROUPS}
    flat = {KEYS.get((group, name), name): v for group, own in groups.items() for name, v in own.items()}
    return {"stage": plan.stage, **flat, "plan": plan.plan}


def save_pipeline(plan: PlannedPipeline, path: str | Path) -> None:
    """Write a pipeline as a JSON file, completely or not at all."""
    write_whole(path, json.dumps(pipeline_to_json(plan)))


def load_pipeline(path: str | Path) -> StatedPipeline:
    """Read what a pipeline file states for a rank; `ProblemError`, which names the file, if that is impossible."""
    return read_as(path, pipeline_from_json)
