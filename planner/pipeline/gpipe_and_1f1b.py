"""Schedules with one stage per rank: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2021) and dataflow.

They differ in how many forwards a stage runs first. A row frees a sent message where torch's
``_step_microbatches`` drops its last reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rematplan.planner.pipeline.actions import PipelineSchedule, schedule_of_rows

OF_FIRST, OF_LAST = ("RECV_F", "DROP_B"), ("RECV_B", "KEEP_B", "FORGET_B", "DROP_F")
"""The kinds of entries that the first stage and the last stage do not have: they have no stage before or after them."""


def gpipe(stages: int, microbatches: int, frees_outputs: bool = False) -> PipelineSchedule:
    """Return the GPipe schedule, with one stage per rank: each stage runs all forwards, then all backwards.

    ``frees_outputs``: whether torch frees sent outputs after the last forward; if not, they exist to the end
    of the step.
    """

    def entries(stage: int) -> Iterator[tuple[str, int]]:
        """Yield the (kind, micro-batch) of a stage's actions and of the entries between them."""
        for m in range(microbatches):
            yield from (("RECV_F", m), ("F", m))
        if frees_outputs:
            yield from (("DROP_F", m) for m in range(microbatches))
        for m in range(microbatches):
            yield "RECV_B", m
            # A loop variable of torch refers to the last gradient received, until the next one is received.
            if m:
                yield "FORGET_B", m - 1
            yield "B", m
            if stage == 0 or m < microbatches - 1:
                yield "KEEP_B", m

    return _with_messages("gpipe", stages, microbatches, entries)


def one_forward_one_backward(stages: int, microbatches: int, frees_outputs: bool = False) -> PipelineSchedule:
    """Return the 1F1B schedule, with one stage per rank: stage s has ``stages`` − s micro-batches in flight, at most
    ``microbatches``. ``frees_outputs``: whether torch frees a sent output before its micro-batch's backward, and not
    after it."""

    def entries(stage: int) -> Iterator[tuple[str, int]]:
        """Yield the (kind, micro-batch) of a stage's actions and of the entries between them."""
        ahead = min(stages - stage, microbatches)
        # Without ``frees_outputs``, an output is freed after its backward, but output ``held`` after the
        # backward that follows the last forward. The last output and the last gradient exist to the end.
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
    """Return a schedule with one stage per rank. ``entries`` yields the (kind, micro-batch) of a stage's row; kinds
    that the first or the last stage cannot have (`OF_FIRST`, `OF_LAST`) are left out."""
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
    """Return a schedule like 1F1B, but each stage has ⌈2·``hop``⌉ more micro-batches in flight for each stage after it,
    so that ranks work while messages travel. ``hop``: the time of a message ÷ the time of a stage's forward and
    backward."""
    more = math.ceil(2 * hop - 1e-9)
    # Stage s of P has 1 + (P − 1 − s)·(1 + ⌈2·hop⌉) in flight.
    in_flight = [1 + hops * (1 + more) for hops in reversed(range(stages))]
    return one_stage_a_rank("dataflow", in_flight, microbatches)


def one_stage_a_rank(name: str, in_flight: Sequence[int], microbatches: int) -> PipelineSchedule:
    """Return the schedule in which each stage runs ``in_flight[stage]`` forwards, then alternates backward
    and forward.

    Numbers above ``microbatches`` count as ``microbatches``.
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
