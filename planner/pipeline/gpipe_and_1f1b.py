"""Schedules with one stage per rank, defined by how many micro-batches each stage has in flight.

GPipe (Huang et al. 2019) and 1F1B (PipeDream-flush, Narayanan et al. 2021) differ only in how many forwards a stage
runs before its first backward. The dataflow schedule is 1F1B with more of them, so that messages travel while both
ends work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rematplan.planner.pipeline.actions import PipelineSchedule, schedule_of_rows


def gpipe(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the GPipe schedule: all forwards, then all backwards."""
    return one_stage_a_rank("gpipe", [microbatches] * stages, microbatches)


def one_forward_one_backward(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the 1F1B schedule: stage s of P has P − s micro-batches in flight.

    These are the fewest with which stages of equal time work without pause, if links take no time.
    """
    return one_stage_a_rank("1f1b", [stages - s for s in range(stages)], microbatches)


def dataflow(stages: int, microbatches: int, hop: float) -> PipelineSchedule:
    """Return a 1F1B schedule with more micro-batches in flight, so that each stage works while its messages travel.

    ``hop``: the time of a message ÷ the time of a stage's forward and backward. If it is above 0, each hop to the
    last stage adds ⌈2·``hop``⌉ micro-batches to those of 1F1B: forwards and backwards alternate, and a fraction of a
    micro-batch cannot be in flight.
    """
    more = math.ceil(2 * hop - 1e-9)
    in_flight = [1 + hops * (1 + more) for hops in reversed(range(stages))]
    return one_stage_a_rank("dataflow", in_flight, microbatches)


def one_stage_a_rank(name: str, in_flight: Sequence[int], microbatches: int) -> PipelineSchedule:
    """Return a schedule named ``name`` in which each stage runs some forwards, and then alternates backward and
    forward.

    ``in_flight``: for each stage, the number of these forwards, at least 1. There are at most ``microbatches`` of
    them.
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
