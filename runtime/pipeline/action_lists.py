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


KINDS: Mapping[str, str] = {
    kind: kind for kind in ("F", "B", "I", "W", "RECV_F", "RECV_B", "SEND_F", "SEND_B")
} | {"WAIT_SEND_F": "DROP_F", "WAIT_SEND_B": "DROP_B"}
"""The kinds of the entries that are read, and their names in a `PipelineSchedule`. When PyTorch 2.15 has waited for the
end of a sending, it frees the message. Earlier versions have no such entries: they keep all messages to the end."""
SENT_OUTPUTS_ARE_FREED = hasattr(pipelining.PipelineStage, "release_fwd_send_outputs")
"""Whether PyTorch frees an output of a stage once it is sent, before the backward. PyTorch 2.15 does so in GPipe and
1F1B. In schedules with several stages per rank, it waits for the sending only after the backward."""
TORCH_CLASSES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""For each schedule, its class in `torch.distributed.pipelining`."""
EACH: Mapping[str, int] = {"zbv": 2, "dualpipev": 2}
"""The number of stages that each rank must have, for schedules that do not allow any."""


@dataclass
class _Stage:
    """A substitute for a `PipelineStage`, with only those attributes that the constructor of a schedule class reads."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None


def action_lists(name: str, ranks: int, stages: int, microbatches: int) -> Lists:
    """Return, for each rank, the actions (kind, stage, micro-batch) of a PyTorch pipeline schedule in order. ``name``:
    a key of `TORCH_CLASSES`, except ``gpipe`` and ``1f1b``. `UsageError` if the schedule does not allow these
    numbers."""
    # Kinds: F forward, B backward, I input gradients only, W weight gradients only. RECV_F, RECV_B: begin to
    # receive from the previous or next stage. DROP_F, DROP_B: free a sent message.
    each = stages // ranks
    if stages % ranks or each != EACH.get(name, each):
        wanted = (
            f"{EACH[name]} stages on each rank" if name in EACH else "the same number of stages on each rank"
        )
        raise UsageError(f"{name} needs {wanted}, not {stages} stages on {ranks} ranks")
    try:
        made = getattr(pipelining, TORCH_CLASSES[name])(
            [_Stage(i, stages, ranks) for i in range(each)],
            microbatches,
            loss_fn=lambda output, target: output,
        )
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    order = made.pipeline_order_with_comms
    return tuple(tuple(a for one in order[rank] for a in _entries(one)) for rank in range(ranks))


def _entries(one: Any) -> list[tuple[str, int, int]]:
    """Return the computations, receives and frees in an entry of a schedule's list; several for an overlapped pair."""
    if one.sub_actions is not None:
        return [action for part in one.sub_actions for action in _entries(part)]
    kind = one.computation_type.value
    return [(KINDS[kind], one.stage_index, one.microbatch_index)] if kind in KINDS else []
