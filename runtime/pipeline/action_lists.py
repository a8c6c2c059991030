"""The action lists of PyTorch's pipeline schedules, read from the schedule classes without a process group.

GPipe and 1F1B are not included, because PyTorch does not run the lists that their classes show:
`rematplan.planner.pipeline.gpipe_and_1f1b` defines those that it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

from rematplan.ir import UsageError

Lists = tuple[tuple[tuple[str, int, int], ...], ...]
"""For each rank its actions (kind F, B, I or W), the starts of receives (kind RECV_F or RECV_B) and the frees of sent
messages (kind DROP_F or DROP_B), in order: kind, stage, micro-batch."""


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule class in `torch.distributed.pipelining`.

    ``cls``: the class's name. ``each``: the number of stages that each rank must have; None for any number.
    """

    cls: str
    each: int | None


KINDS: Mapping[str, str] = {
    kind: kind for kind in ("F", "B", "I", "W", "RECV_F", "RECV_B", "SEND_F", "SEND_B")
} | {
    "WAIT_SEND_F": "DROP_F",
    "WAIT_SEND_B": "DROP_B",
}
"""The kinds of the entries that are read, and their names in a `PipelineSchedule`. When PyTorch 2.15 has waited for the
end of a sending, it frees the message. Earlier versions have no such entries: they keep all messages to the end."""
SENT_OUTPUTS_ARE_FREED = hasattr(pipelining.PipelineStage, "release_fwd_send_outputs")
"""Whether PyTorch frees an output of a stage once it is sent, before the backward. PyTorch 2.15 does so in GPipe and
1F1B. In schedules with several stages per rank, it waits for the sending only after the backward."""
SCHEDULES: Mapping[str, TorchSchedule] = {
    "interleaved": TorchSchedule("ScheduleInterleaved1F1B", None),
    "zbv": TorchSchedule("ScheduleZBVZeroBubble", 2),
    "interleaved-zb": TorchSchedule("ScheduleInterleavedZeroBubble", None),
    "dualpipev": TorchSchedule("ScheduleDualPipeV", 2),
}


@dataclass
class _Stage:
    """A substitute for a `PipelineStage`, with only those attributes that the constructor of a schedule class reads."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None


def action_lists(name: str, ranks: int, stages: int, microbatches: int) -> Lists:
    """Return, for each rank, the actions (kind, stage, micro-batch) of a PyTorch pipeline schedule in order;
    `UsageError` if the numbers do not fit."""
    # Kinds: F forward, B backward, I input gradients only, W weight gradients only. RECV_F, RECV_B: begin to
    # receive from the previous or next stage. DROP_F, DROP_B: free a sent message.
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
    order = made.pipeline_order_with_comms
    return tuple(tuple(a for one in order[rank] for a in _entries(one)) for rank in range(ranks))


def _entries(one: Any) -> list[tuple[str, int, int]]:
    """Return the computations, receives and frees in one entry of a schedule's list; none for a send, several for an
    overlapped pair."""
    if one.sub_actions is not None:
        return [action for part in one.sub_actions for action in _entries(part)]
    kind = one.computation_type.value
    return [(KINDS[kind], one.stage_index, one.microbatch_index)] if kind in KINDS else []
