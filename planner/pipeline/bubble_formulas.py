"""Known formulas for the bubble of pipeline schedules: the share of time in which ranks do not work.

They hold if all stages take equal time and messages take no time. In schedules with a split backward, the forward F,
the input's gradient I and the weights' gradients W must take equal time. In other schedules forward and backward may
differ. The number of micro-batches must be one that the schedule divides evenly, and at least twice the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """A formula for the *bubble* of a pipeline schedule: the share (0 to 1) of time in which ranks do not work.

    ``text``: the formula for readers. ``bubble``: a function that returns its value for P ranks, M micro-batches and v
    stages per rank. ``source``: the publication.
    """

    text: str
    bubble: Callable[[int, int, int], float]
    source: str


def _plain(ranks: int, microbatches: int, _each: int) -> float:
    return (ranks - 1) / (microbatches + ranks - 1)


def _interleaved(ranks: int, microbatches: int, each: int) -> float:
    return (ranks - 1) / (each * microbatches + ranks - 1)


def _zero_bubble(ranks: int, microbatches: int, each: int) -> float:
    """Return the share of time in which ranks do not work, in a schedule that fills the pipeline's pauses with
    gradients of weights (zero bubble).

    A rank has v stages (``each``). The forward of all of them for one micro-batch takes F, and so do the input's
    gradients and the weights' gradients. A rank pauses for (P − 1)·F ÷ v and works for 3·M·F in a step of M
    micro-batches on P ranks.
    """
    return (ranks - 1) / (3 * each * microbatches + ranks - 1)


def _pairs(ranks: int, microbatches: int, each: int) -> float:
    """Return the share of time in which ranks do not work in DualPipeV, where a forward and a backward run as a pair.

    The published pause is (P − 1)·(F&B + B − 3W), with the times of one stage: F&B of a pair, B of a backward, W of the
    weights' gradients. A rank runs a pair's forward and backward one after the other, so F&B is F + B. So the
    pause is twice as long as in `_zero_bubble`.
    """
    return 2 * (ranks - 1) / (3 * each * microbatches + 2 * (ranks - 1))


_PLAIN = Formula("(P - 1) / (M + P - 1)", _plain, "Huang et al. 2019; Narayanan et al. 2021")
_ZERO = Formula("(P - 1) / (3vM + P - 1), a pause of (P - 1) F / v", _zero_bubble, "Qi et al. 2024")

FORMULAS: Mapping[str, Formula] = {
    "gpipe": _PLAIN,
    "1f1b": _PLAIN,
    "interleaved": Formula("(P - 1) / (vM + P - 1)", _interleaved, "Narayanan et al. 2021"),
    "interleaved-zb": _ZERO,
    "zbv": _ZERO,
    "dualpipev": Formula(
        "2 (P - 1) / (3vM + 2 (P - 1)), a pause of 2 (P - 1) F / v", _pairs, "DeepSeek-AI 2024, DualPipe"
    ),
    "dataflow": _PLAIN,
}


def utilisation_bound(ranks: int, hop: float) -> float:
    """Return an upper bound of the share (0 to 1) of time in which the first rank of a 1F1B pipeline can work.

    ``ranks``: the number of ranks, which is also the number of micro-batches that the first rank has in flight in 1F1B.
    ``hop``: the time of a message to the next rank ÷ the time of a stage's forward and backward. While one micro-batch
    travels to the last rank and back, the first rank can only work on the micro-batches in flight.
    """
    return ranks / (ranks + 2 * (ranks - 1) * hop)


def ideal_utilisation(ranks: int, microbatches: int, hop: float) -> float:
    """Return an upper bound of the share (0 to 1) of a step in which a rank can work, for any order of actions. The
    share is below 1 because the pipeline has to fill and drain once per step.

    ``hop``: the time of a message to the next rank ÷ the time of a stage's forward and backward.
    """
    return microbatches / (microbatches + (ranks - 1) * (1 + 2 * hop))
