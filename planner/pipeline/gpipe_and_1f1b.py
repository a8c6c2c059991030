"""Pipeline schedules with one stage per rank: GPipe, 1F1B, and 1F1B with more micro-batches in flight (dataflow).

In GPipe (Huang et al. 2019) and 1F1B (PipeDream-flush, Narayanan et al. 2021), a stage first runs some forwards, then
alternates backward and forward. The schedules differ only in how many forwards a stage runs before its first backward.
In the dataflow schedule it runs more forwards than in 1F1B, so that the stages work while messages between them travel.

Where a row of GPipe or 1F1B frees a sent message was read off the methods ``_step_microbatches`` of torch's classes: it
is where the last variable is overwritten or cleared that refers to the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rematplan.planner.pipeline.actions import PipelineSchedule, schedule_of_rows

OF_FIRST, OF_LAST = ("RECV_F", "DROP_B"), ("RECV_B", "KEEP_B", "FORGET_B", "DROP_F")
"""The kinds of entries that the first stage and the last stage do not have: they have no stage before or after them."""


def gpipe(stages: int, microbatches: int, frees_outputs: bool = False) -> PipelineSchedule:
    """Return the GPipe schedule, with one stage per rank: each stage runs all forwards, then all backwards.

    ``frees_outputs``: whether torch frees outputs once they are sent: after the last forward. If not, it keeps all
    messages to the end of the step. It always keeps the gradients that it sends. A loop variable of torch refers to the
    last received gradient until the next one is received; on the first stage, which sends none, to the end of the step.
    """

    def entries(stage: int) -> Iterator[tuple[str, int]]:
        for m in range(microbatches):
            yield from (("RECV_F", m), ("F", m))
        if frees_outputs:
            yield from (("DROP_F", m) for m in range(microbatches))
        for m in range(microbatches):
            yield "RECV_B", m
            if m:
                yield "FORGET_B", m - 1
            yield "B", m
            if stage == 0 or m < microbatches - 1:
                yield "KEEP_B", m

    return _with_messages("gpipe", stages, microbatches, entries)


def one_forward_one_backward(stages: int, microbatches: int, frees_outputs: bool = False) -> PipelineSchedule:
    """Return the 1F1B schedule, with one stage per rank: stage s has ``stages`` − s micro-batches in flight, at most
    ``microbatches``.

    With fewer in flight, the step takes longer. With this number, stages of equal time pause only before their first
    backward and after their last forward, if messages take no time.

    A gradient is freed after the stage's next backward. The last one exists to the end of the step.

    ``frees_outputs``: whether torch frees outputs once they are sent: during the first forwards after the next forward,
    later before the next backward. If not, an output is freed after its micro-batch's backward, with two exceptions.
    The last output exists to the end of the step. Of the forwards before the first backward, the output of the last but
    one is not freed before the backward that follows the last forward.
    """

    def entries(stage: int) -> Iterator[tuple[str, int]]:
        ahead = min(stages - stage, microbatches)
        held, until = ahead - 2, max(ahead - 2, microbatches - ahead)
        for m in range(ahead):
            yield from (("RECV_F", m), ("F", m))
            if frees_outputs and m:
                yield "DROP_F", m - 1
        for m in range(microbatches):
            yield "RECV_B", m
            if frees_outputs and m + ahead <= microbatches:
                yield "DROP_F", m + ahead - 1
            yield "B", m
            if m:
                yield "DROP_B", m - 1
            if not frees_outputs and m not in (held, microbatches - 1):
                yield "DROP_F", m
            if not frees_outputs and m == until and held >= 0:
                yield "DROP_F", held
            if m + ahead < microbatches:
                yield from (("RECV_F", m + ahead), ("F", m + ahead))

    return _with_messages("1f1b", stages, microbatches, entries)


def _with_messages(
    name: str, stages: int, microbatches: int, entries: Callable[[int], Iterator[tuple[str, int]]]
) -> PipelineSchedule:
    """Return a pipeline schedule with one stage per rank.

    ``name``: the schedule's name. ``entries``: yields the entries of a stage's row as (kind, micro-batch). Those that
    the first or the last stage does not have are left out.
    """
    rows = [
        [
            (kind, stage, m)
            for kind, m in entries(stage)
            if not (stage == 0 and kind in OF_FIRST) and not (stage == stages - 1 and kind in OF_LAST)
        ]
        for stage in range(stages)
    ]
    return schedule_of_rows(name, stages, microbatches, rows)


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
