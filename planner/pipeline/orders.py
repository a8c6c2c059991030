"""Action lists of schedules with one stage a rank, by how many micro-batches each stage has in flight.

GPipe (Huang et al. 2019) and 1F1B (PipeDream-flush, Narayanan et al. 2021) differ only in how many micro-batches a
stage begins before its first backward. The dataflow order is 1F1B with more of them, so that messages travel while both
ends work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rematplan.planner.pipeline.actions import PipelineSchedule, schedule_of_rows


def gpipe(stages: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards."""
    return one_stage_a_rank("gpipe", [microbatches] * stages, microbatches)


def one_forward_one_backward(stages: int, microbatches: int) -> PipelineSchedule:
    """Stage s has P − s micro-batches in flight: the fewest with which stages of equal time work without pause over
    links that take none."""
    return one_stage_a_rank("1f1b", [stages - s for s in range(stages)], microbatches)


def dataflow(stages: int, microbatches: int, hop: float) -> PipelineSchedule:
    """A bidirectional pipeline: each stage begins enough micro-batches to work while its messages travel.

    Args:
        hop: the time of a message on a link ÷ the time of a stage's forward and backward; above ``0`` every hop to the
            last stage adds ⌈2·``hop``⌉ micro-batches to 1F1B's (one up to ½), since forwards and backwards alternate
            and a fraction cannot be in flight.
    """
    more = math.ceil(2 * hop - 1e-9)
    in_flight = [1 + hops * (1 + more) for hops in reversed(range(stages))]
    return one_stage_a_rank("dataflow", in_flight, microbatches)


def one_stage_a_rank(name: str, in_flight: Sequence[int], microbatches: int) -> PipelineSchedule:
    """Stages that begin so many micro-batches, and then alternate backward and forward, the last stage first to turn.

    Args:
        in_flight: of each stage, at most; at least 1.
    """
    rows = []
    for stage, most in enumerate(in_flight):
        ahead = min(most, microbatches)
        row = [("F", stage, m) for m in range(ahead)]
        for m in range(microbatches):
            row.append(("B", stage, m))
            if m + ahead < microbatches:
                row.append(("F", stage, m + ahead))
        rows.append(row)
    return schedule_of_rows(name, len(in_flight), microbatches, rows)
