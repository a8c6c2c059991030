"""Known bubbles of schedules whose stages all take the same time, over links that take none.

They hold for F = I = W and for B = I + W, for any F ÷ B where the schedule has no W, and for micro-batches that the
schedule divides evenly, at least twice as many as ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """``text``: the formula for a person. ``bubble``: its value for P ranks, M micro-batches and v stages a rank.
    ``source``: where it is from."""

    text: str
    bubble: Callable[[int, int, int], float]
    source: str


def _plain(ranks: int, microbatches: int, _each: int) -> float:
    return (ranks - 1) / (microbatches + ranks - 1)


def _interleaved(ranks: int, microbatches: int, each: int) -> float:
    return (ranks - 1) / (each * microbatches + ranks - 1)


def _zero_bubble(ranks: int, microbatches: int, each: int) -> float:
    """A rank's pause is (P − 1)·F ÷ v, its work 3·M·F, with F, I and W of a rank's stages together equally long."""
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
    """The share of its time that the first rank of 1F1B can work at most, over links that take ``hop`` of the time of a
    stage's forward and backward: P micro-batches are in flight during one round trip."""
    return ranks / (ranks + 2 * (ranks - 1) * hop)


def ideal_utilisation(ranks: int, microbatches: int, hop: float) -> float:
    """The share of its time that a rank can work at most under any order: the pipeline fills and drains once, over the
    same links."""
    return microbatches / (microbatches + (ranks - 1) * (1 + 2 * hop))
