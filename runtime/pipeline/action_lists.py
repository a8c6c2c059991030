"""The action lists of PyTorch's pipeline schedules, read from the schedule classes without a process group.

A schedule class computes the lists of all ranks when it is constructed. It only asks its stages for their
position, so stages without a module suffice. GPipe and 1F1B are not included: PyTorch's loops for one stage
per rank do not follow the list that they show (that of 1F1B's last rank begins with micro-batch 1), so
`rematplan.planner.pipeline.gpipe_and_1f1b` defines what they run.
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
    """A schedule class in `torch.distributed.pipelining`.

    ``cls``: its name. ``each``: the number of stages per rank that it requires; None for any.
    """

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
    """The attributes of a stage that a schedule class reads."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None


def action_lists(name: str, ranks: int, stages: int, microbatches: int) -> Lists:
    """Return the actions of all ranks, in the order in which a PyTorch schedule runs them: kind (F forward, B
    backward, I input gradients, W weight gradients), stage, micro-batch.

    Args:
        name: a key of `SCHEDULES`.
        ranks: the number of ranks.
        stages: the number of stages of all ranks together; each rank has equally many.
        microbatches: the number of micro-batches.

    Raises:
        UsageError: the schedule does not allow these numbers.
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
    """Return the computations of one entry of a list: none for a pause, several if forward and backward
    overlap."""
    if one is None:
        return []
    if one.sub_actions is not None:
        return [action for part in one.sub_actions for action in _computing(part)]
    kind = one.computation_type.value
    return [(kind, one.stage_index, one.microbatch_index)] if kind in ("F", "B", "I", "W") else []
