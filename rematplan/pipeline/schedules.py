"""Pipeline schedules by name, such as ``1f1b``: the order in which ranks run forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rematplan.ir import UsageError
from rematplan.planner.pipeline.actions import PipelineSchedule, schedule_of_rows
from rematplan.planner.pipeline.gpipe_and_1f1b import (
    dataflow,
    gpipe,
    one_forward_one_backward,
    one_stage_a_rank,
)
from rematplan.planner.pipeline.pipeline_file import StatedPipeline

ONE_STAGE: Mapping[str, Callable[[int, int, float], PipelineSchedule]] = {
    "gpipe": lambda ranks, microbatches, hop: gpipe(ranks, microbatches, _frees_outputs()),
    "1f1b": lambda ranks, microbatches, hop: one_forward_one_backward(ranks, microbatches, _frees_outputs()),
    "dataflow": dataflow,
}
"""Schedules with one stage per rank."""
VIRTUAL = ("interleaved", "zbv", "interleaved-zb", "dualpipev")
"""Schedules with several stages per rank. Their actions come from torch's classes."""
SCHEDULES = (*ONE_STAGE, *VIRTUAL)
SPLIT = ("zbv", "interleaved-zb", "dualpipev")
"""Schedules that compute weight gradients separately from the input's gradient."""
STAGES_A_RANK = 2
"""The default number of stages per rank in `VIRTUAL` schedules."""

MOST = 10**6
"""The largest product of ranks and micro-batches. A simulation of more actions takes minutes, and gigabytes."""


def schedule_named(
    name: str, ranks: int, microbatches: int, *, each: int | None = None, hop: float = 0.0
) -> PipelineSchedule:
    """Return the schedule called ``name``: for each rank, the order of its actions (forwards and backwards of stages).
    ``each``: stages on a rank, if not as usual. ``hop``: for ``dataflow``, a message's time divided by that of a
    stage's forward and backward. `UsageError` if there is none for these numbers."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if ranks * microbatches > MOST:
        raise UsageError(
            f"{ranks} ranks with {microbatches} micro-batches are too many to simulate; the product can be at most "
            f"{MOST}"
        )
    if name in ONE_STAGE:
        if each not in (None, 1):
            raise UsageError(f"{name} has one stage on each rank, not {each}")
        if name == "1f1b" and microbatches < ranks:  # torch's class refuses it, too
            raise UsageError(
                f"1f1b needs at least as many micro-batches as ranks: {ranks}, not {microbatches}"
            )
        return ONE_STAGE[name](ranks, microbatches, hop)
    # Imported here, since torch takes seconds to load.
    from rematplan.runtime.pipeline.action_lists import action_lists

    stages = ranks * (each or STAGES_A_RANK)
    return schedule_of_rows(name, stages, microbatches, action_lists(name, ranks, stages, microbatches))


def _frees_outputs() -> bool:
    from rematplan.runtime.pipeline.action_lists import SENT_OUTPUTS_ARE_FREED  # torch takes seconds to load

    return SENT_OUTPUTS_ARE_FREED


def schedule_of_stages(name: str, stages: int, microbatches: int, hop: float = 0.0) -> PipelineSchedule:
    """Return the schedule called ``name`` for so many stages, as many on each rank as usual; `UsageError` if there is
    none. ``hop``: for ``dataflow``, a message's time divided by that of a stage's forward and backward."""
    each = STAGES_A_RANK if name in VIRTUAL else 1
    if stages % each:
        raise UsageError(f"{name} has {each} stages on each rank; {stages} stages are not a multiple of that")
    return schedule_named(name, stages // each, microbatches, hop=hop)


def stated_schedule(file: StatedPipeline) -> PipelineSchedule:
    """Return the schedule of a pipeline file, with the actions of this PyTorch; `UsageError` if there is none for its
    numbers."""
    order = schedule_of_stages(file.schedule, file.stages, file.microbatches)
    if order.ranks != file.ranks:
        raise UsageError(f"{file.stages} stages of {order.name} have {order.ranks} ranks, not {file.ranks}")
    if order.name == "dataflow":
        return one_stage_a_rank(order.name, file.in_flight, file.microbatches)
    return order
