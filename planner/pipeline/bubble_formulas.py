"""Published formulas for the bubble of pipeline schedules: the share of time in which ranks do not work.

They hold for stages of equal time, free messages, F = I = W in split backwards, and evenly divided
micro-batches, at least twice as many as ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """A published formula for the bubble (0 to 1) of a pipeline schedule."""

    text: str
    bubble: Callable[[int, int, int], float]
    """Takes the numbers of ranks, of micro-batches, and of stages per rank."""
    source: str
    """The publication."""


def _plain(ranks: int, microbatches: int, _each: int) -> float:
    return (ranks - 1) / (microbatches + ranks - 1)


def _interleaved(ranks: int, microbatches: int, each: int) -> float:
    return (ranks - 1) / (each * microbatches + ranks - 1)


def _zero_bubble(ranks: int, microbatches: int, each: int) -> float:
    """Return the bubble if gradients of weights fill the pauses. ``each``: the stages per rank."""
    # With F of all v stages of a rank, a rank pauses for (P − 1)·F ÷ v and works for 3·M·F.
    return (ranks - 1) / (3 * each * microbatches + ranks - 1)


def _pairs(ranks: int, microbatches: int, each: int) -> float:
    """Return the bubble of DualPipeV, in which a forward and a backward run as a pair."""
    # The published pause is (P − 1)·(F&B + B − 3W). A rank runs a pair's two actions one after the other, so
    # F&B is F + B, and the pause is twice that of `_zero_bubble`.
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
