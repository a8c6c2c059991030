"""The action lists of torch's pipeline schedules, read off the schedule classes without any process group.

Each class works out the lists of all ranks when it is made. It asks its stages only where they stand, so that stages
without a module do. GPipe and 1F1B are not among them: torch's loops over one stage do not use the list that they show
(the last rank's of 1F1B begins with micro-batch 1), and `rematplan.planner.pipeline.orders` states what the loops run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

from rematplan.ir import UsageError

Lists = tuple[tuple[tuple[str, int, int], ...], ...]
"""For each rank its actions in order: kind (F, B, I or W), stage, micro-batch."""


@dataclass(frozen=True)
class TorchSchedule:
    """The name of a class in `torch.distributed.pipelining`. ``each``: the stages that a rank must have; None for any
    number."""

    cls: str
    each: int | None


SCHEDULES: Mapping[str, TorchSchedule] = {
    "interleaved": TorchSchedule("ScheduleInterleaved1F1B", None),
    "zbv": TorchSchedule("ScheduleZBVZeroBubble", 2),
    "interleaved-zb": TorchSchedule("ScheduleInterleavedZeroBubble", None),
    "dualpipev": TorchSchedule("ScheduleDualPipeV", 2),
}


@dataclass
class _Stage:
    """What a schedule class asks a stage."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None


def action_lists(name: str, ranks: int, stages: int, microbatches: int) -> Lists:
    """The action lists of one of `SCHEDULES`.

    Args:
        stages: in all, the same number on each rank.

    Raises:
        UsageError: the class refuses these numbers.
    """
    kind = SCHEDULES[name]
    each = stages // ranks
    if stages % ranks or (kind.each is not None and each != kind.each):
        wanted = f"{kind.each} stages on each rank" if kind.each else "the same number of stages on each rank"
        raise UsageError(f"{name} needs {wanted}, not {stages} stages on {ranks} ranks")
    try:
        made = getattr(pipelining, kind.cls)(
            [_Stage(i, stages, ranks) for i in range(each)],
            microbatches,
            loss_fn=lambda output, target: output,
        )
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    order = made.pipeline_order
    return tuple(tuple(a for one in order[rank] for a in _computing(one)) for rank in range(ranks))


def _computing(one: Any) -> list[tuple[str, int, int]]:
    """The computations of one entry of a list: none of a pause, several of an overlap of forward and backward."""
    if one is None:
        return []
    if one.sub_actions is not None:
        return [action for part in one.sub_actions for action in _computing(part)]
    kind = one.computation_type.value
    return [(kind, one.stage_index, one.microbatch_index)] if kind in ("F", "B", "I", "W") else []
