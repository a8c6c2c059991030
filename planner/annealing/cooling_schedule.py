"""The constants of a search by simulated annealing, which is a sequence of hot and reheated rounds
(`annealing_search`).

Lengths follow the sequence of Luby, Sinclair and Zuckerman (1993), because the minimum is decided early in a
round. For the same reason some pairs are *gentle*: the price of bytes over the budget rises slowly. Without
phases, hot rounds may first look for an order of the ops, and become longer step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Ordering(NamedTuple):
    """A stage of a round that changes only the order of the runs, in problems without phases.

    The price is constant: if it rose while nothing fits, no change would be accepted.
    """

    share: float
    """The share of the round that the stage takes."""
    heat: tuple[float, float]
    """The first and the last temperature. 1 is the energy of a mean tensor over the budget at one run."""


@dataclass(frozen=True)
class CoolingSchedule:
    """The constants of a search by simulated annealing. Fields for which no measurement is stated were tuned by hand.
    Temperatures are in percent of the base cost, lengths in shortest rounds. A price of 1: a mean tensor over the
    budget at one run costs a mean run."""

    reorders: bool
    """Whether the search looks for a good order of the ops. It does so only for problems without phases, because the
    order of their ``graph.ops`` may be a bad one."""
    last_heat: float
    """The final temperature of a round."""
    shortest: tuple[float, float]
    """The length of the shortest round, apart from a constant. First number: its moves per op in small problems;
    second: the number of ops at which these are doubled."""
    patience: int
    """The search ends after this many rounds in a row without improvement. They take at least 25 times as long as the
    shortest round."""

    reheat: float = 0.2
    """The initial temperature of a reheated round ÷ that of a hot round."""
    suggested_heat: float = 0.3
    """The initial temperature for a sequence that the search for a lower bound suggests ÷ that of a hot round."""
    suggested_share: float = 0.25
    """The share of a reheated round in which the suggested sequence is annealed. With a half, too little time was
    left for the best sequence."""

    gentle_length: int = 4
    """The length of a gentle round, in which the price rises slowly, ÷ the length of a round in which it rises
    steeply. Both rounds of a gentle pair, hot and reheated, have it.

    The mean overhead of an image and a text tower at a fifth of their activations fell from 29.3 to 24.4 % (1.5 million
    moves, six seeds). That of U-Net at 0.3 of its activations fell from 14.72 to 14.51 %. For other networks the
    difference was within the scatter between seeds.
    """
    rising_share: float = 0.3
    """The largest share of a gentle hot round in which the price rises slowly, until something fits."""
    rising_factor: float = 1e4
    """The factor by which the price rises over all of ``rising_share``. The price at which something fits is 50 to
    some thousand times the first price."""

    growth: float = 1.5
    """Without phases: the length of a hot round ÷ that of the hot round before it."""
    between: float = 0.33
    """Without phases, once a plan fits: the length of a reheated round ÷ that of the hot round before it. The
    descents after a hot round also take this share of its length."""
    ordering: Ordering = field(default_factory=lambda: Ordering(0.4, (300.0, 1.0)))
    """Without phases: the stage of a hot round that looks for an order.

    With this stage in every hot round, problems that are nearly training steps got worse plans (67 ops: overheads up
    to 14 and 47 %, where rounds of both kinds find 7.9 and 40 %). So hot rounds without it are tried, too.
    """
    loose: float = 1.15
    """Without phases: in two of every four hot rounds, the order is sought for a budget this many times as large. The
    order with the fewest bytes over the budget itself is nearly always the same. It need not be the one in which
    recomputation is cheapest."""
    explored: int = 4
    """Without phases: one of this many hot rounds uses the variant, with or without a stage that looks for an order,
    that has led to the larger overhead so far. With 2 instead of 4, those rounds never came near the others on random
    layered graphs."""
    shake: Ordering = field(default_factory=lambda: Ordering(0.3, (100.0, 1.0)))
    """Without phases: the stage at the beginning of every other reheated round that changes the order. It reorders
    the best sequence for a smaller budget (``shake_budget``), so that recomputations can become unnecessary. Reheated
    rounds without it stay in their local minimum."""
    shake_budget: float = 0.85
    """Without phases: the budget for which the stage ``shake`` reorders ÷ the search's budget."""
    shaken_price: float = 0.5
    """Without phases: the first price of bytes over the budget after the stage ``shake``."""
    prices: tuple[float, float] = (0.1, 10.0)
    """Without phases: the price of bytes over the budget at the beginning of a stage, and at the end of
    ``priced_share`` of the stage. After that, it rises as long as nothing fits. At small budgets nothing fits for
    long. A price that rose all the time would soon prevent all changes."""
    priced_share: float = 0.9
    """Without phases: the share of a stage in which the search sets the price itself, between the two ``prices``."""
    two_threads: int = 40
    """Without phases: the smallest number of ops for which a second thread is used."""

    def hot(self, ops: int) -> float:
        """Return a hot round's first temperature for ``ops`` ops, in percent of the base cost. It is 30 ÷ ``ops``,
        about a third of a mean op, and at least 0.1 if `reorders`, else 0.3. Unless `reorders`, it is 0.1 from 600 ops
        on and 0.01 from 4000 on, because there is no time to cool."""
        if self.reorders:
            return max(0.1, 30.0 / max(ops, 1))
        return max(0.3, 30.0 / max(ops, 1)) if ops < 600 else 0.1 if ops < 4000 else 0.01

    def length(self, k: int, fits: bool) -> float:
        """Return the length of round ``k`` ÷ the length of the shortest round. ``fits``: whether a plan within the
        budget is known."""
        if not self.reorders:
            return self.gentle_length * luby(k // 4) if self.is_gentle(k, fits) else luby(k // 2)
        return float(self.growth ** (k // 2) * (self.between if k % 2 and fits else 1.0))

    def is_gentle(self, k: int, fits: bool) -> bool:
        """Return whether round ``k`` is gentle: every other pair of rounds with phases, if a plan fits (``fits``)."""
        return not self.reorders and k % 4 >= 2 and fits

    def order_budget(self, k: int) -> float:
        """Return the budget for which round ``k`` (even, so hot) looks for an order of the ops, as a multiple of the
        search's budget."""
        return self.loose if k // 2 % 4 >= 2 else 1.0

    def looks_for_order(self, k: int, with_order: float, without: float) -> bool:
        """Return whether hot round ``k`` looks for an order first; never unless `reorders`. Both variants alternate
        at first, and until one with an order has fitted. Then the one with less overhead (``with_order``,
        ``without``) is used, and in each `explored`-th hot round the other."""
        number = k // 2
        if not self.reorders or number < 2 or with_order == float("inf"):
            return self.reorders and number % 2 == 0
        # The variant that reached the smaller overhead, and in some rounds the other.
        return (with_order <= without) != (number % self.explored == self.explored - 1)


WITH_PHASES = CoolingSchedule(reorders=False, last_heat=0.001, shortest=(75.0, 5000.0), patience=62)
"""The schedule for training steps, and for problems whose order must be kept."""
WITHOUT_PHASES = CoolingSchedule(reorders=True, last_heat=0.003, shortest=(150.0, 1000.0), patience=11)
"""The schedule for problems that are not training steps. Because hot rounds become longer, a smaller ``patience``
takes about as long."""


def luby(k: int) -> int:
    """Return term k of 1, 1, 2, 1, 1, 2, 4, 1, 1, 2, ... (Luby, Sinclair and Zuckerman 1993), from k = 0."""
    term = k + 1
    while term & (term + 1):  # until it is 2^i - 1, the end of a repetition, which is followed by 2^(i-1)
        term -= (1 << term.bit_length() - 1) - 1
    return (term + 1) // 2
