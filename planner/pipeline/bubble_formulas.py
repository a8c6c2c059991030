"""Known bubbles of pipeline schedules whose stages all take the same time, over links that take no time.

They hold if F = I = W and B = I + W; without W, for any F ÷ B. The number of micro-batches must be divided evenly by
the schedule, and be at least twice the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """The *bubble* of a pipeline schedule as a formula: the share of the ranks' time in which they do not work.

    ``text``: the formula for readers. ``bubble``: returns its value for P ranks, M micro-batches and v stages per
    rank. ``source``: the publication.
    """

    text: str
    bubble: Callable[[int, int, int], float]
    source: str


def _plain(ranks: int, microbatches: int, _each: int) -> float:
    return (ranks - 1) / (microbatches + ranks - 1)


def _interleaved(ranks: int, microbatches: int, each: int) -> float:
    return (ranks - 1) / (each * microbatches + ranks - 1)


def _zero_bubble(ranks: int, microbatches: int, each: int) -> float:
    """A rank pauses for (P − 1)·F ÷ v and works for 3·M·F, if F, I and W of its stages together take equally long."""
    return (ranks - 1) / (3 * each * microbatches + ranks - 1)


_PLAIN = Formula("(P - 1) / (M + P - 1)", _plain, "Huang et al. 2019; Narayanan et al. 2021")
_ZERO = Formula("(P - 1) / (3vM + P - 1), a pause of (P - 1) F / v", _zero_bubble, "Qi et al. 2024")

FORMULAS: Mapping[str, Formula] = {
    "gpipe": _PLAIN,
    "1f1b": _PLAIN,
    "interleaved": Formula("(P - 1) / (vM + P - 1)", _interleaved, "Narayanan et al. 2021"),
    "interleaved-zb": _ZERO,
    "zbv": _ZERO,
    "dualpipev": _ZERO,
    "dataflow": _PLAIN,
}


def utilisation_bound(ranks: int, hop: float) -> float:
    """Return an upper bound of the share (0 to 1) of time in which the first of ``ranks`` ranks can work in 1F1B,
    where it has as many micro-batches in flight as there are ranks.

    ``hop``: the time of a message to the next rank ÷ the time of a stage's forward and backward. The first rank's
    micro-batches in flight all pass during one round trip to the last rank.
    """
    return ranks / (ranks + 2 * (ranks - 1) * hop)


def ideal_utilisation(ranks: int, microbatches: int, hop: float) -> float:
    """Return the largest share (0 to 1) of a step in which a rank can work, whatever the order of actions: the
    pipeline has to fill and drain once.

    ``hop``: the time of a message to the next rank ÷ the time of a stage's forward and backward.
    """
    return microbatches / (microbatches + (ranks - 1) * (1 + 2 * hop))
