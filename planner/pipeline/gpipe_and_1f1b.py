"""Pipeline schedules with one stage per rank: GPipe, 1F1B, and 1F1B with more micro-batches in flight (dataflow).

In GPipe (Huang et al. 2019) and 1F1B (PipeDream-flush, Narayanan et al. 2021), a stage first runs some forwards, then
alternates backward and forward. The schedules differ only in how many forwards a stage runs before its first backward.
In the dataflow schedule it runs more forwards than in 1F1B, so that the stages work while messages between them travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rematplan.planner.pipeline.actions import PipelineSchedule, schedule_of_rows


def gpipe(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the GPipe schedule, with one stage per rank: each stage runs all forwards, then all backwards."""
    return one_stage_a_rank("gpipe", [microbatches] * stages, microbatches)


def one_forward_one_backward(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the 1F1B schedule, with one stage per rank: stage s has ``stages`` − s micro-batches in flight, at most
    ``microbatches``.

    With fewer in flight, the step takes longer. With this number, stages of equal time pause only before their first
    backward and after their last forward, if messages take no time.
    """
    return one_stage_a_rank("1f1b", [stages - s for s in range(stages)], microbatches)


def dataflow(stages: int, microbatches: int, hop: float) -> PipelineSchedule:
    """Return a schedule like 1F1B with more micro-batches in flight, so that each stage works while its messages
    travel.

    ``hop``: the time of a message ÷ the time of a stage's forward and backward. Stage s of P stages has 1 + (P − 1 −
    s)·(1 + ⌈2·``hop``⌉) micro-batches in flight, at most ``microbatches``. With ``hop`` = 0 the result is 1F1B.
    """
    more = math.ceil(2 * hop - 1e-9)
    in_flight = [1 + hops * (1 + more) for hops in reversed(range(stages))]
    return one_stage_a_rank("dataflow", in_flight, microbatches)


def one_stage_a_rank(name: str, in_flight: Sequence[int], microbatches: int) -> PipelineSchedule:
    """Return a pipeline schedule with one stage per rank. Each stage first runs some forwards, then alternates one
    backward and one forward, and then runs the backwards that are left.

    ``name``: the name of the schedule. ``in_flight``: for each stage, the number of forwards before its first backward,
    at least 1; numbers above ``microbatches`` count as ``microbatches``.
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
