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
    """Return the 1F1B schedule: stage s of ``stages`` has ``stages`` − s micro-batches in flight.

    With fewer, stages of equal time would have to pause between two actions even if messages took no time.
    """
    return one_stage_a_rank("1f1b", [stages - s for s in range(stages)], microbatches)


def dataflow(stages: int, microbatches: int, hop: float) -> PipelineSchedule:
    """Return a 1F1B schedule with more micro-batches in flight, so that each stage works while its messages travel.

    ``hop``: the time of a message ÷ the time of a stage's forward and backward. Stage s of P has 1 + (P − 1 − s)·(1 +
    ⌈2·``hop``⌉) micro-batches in flight, at most ``microbatches``; 1F1B is the case ``hop`` = 0. The ceiling is there
    because a fraction of a micro-batch cannot be in flight.
    """
    more = math.ceil(2 * hop - 1e-9)
    in_flight = [1 + hops * (1 + more) for hops in reversed(range(stages))]
    return one_stage_a_rank("dataflow", in_flight, microbatches)


def one_stage_a_rank(name: str, in_flight: Sequence[int], microbatches: int) -> PipelineSchedule:
    """Return a schedule named ``name`` in which each stage runs some forwards, then alternates backward and forward,
    and ends with the backwards that are left.

    ``in_flight``: for each stage, the number of forwards to begin with, at least 1; more than ``microbatches`` count
    as ``microbatches``.
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
