"""The temperature schedule of the annealing: how hot a round begins, how long it is, how prices rise, when to give up.

A search is a sequence of rounds, alternately hot and reheated (`restarts`).

The local minimum in which a hot round ends is decided early and depends little on the round's length, so many short
rounds find a good one sooner than a few slow ones. The best length differs between problems. Lengths follow the
sequence of Luby, Sinclair and Zuckerman (1993), which gives each power of two about the same share of the time, and
loses at most a logarithm against the best length.

It is decided early because the price of bytes over the budget rises in the first few ten thousand moves of a round
of any length: it quenches. Once something fits, every other pair of rounds is gentle: the price rises slowly, at
the first temperature. Where memory is scarcest, this finds minima that a quench misses. Elsewhere many quenches are
as good; and as long as nothing fits, a slow rise achieves nothing within a few thousand moves.

In problems without phases, hot rounds look for an order first, or not, whichever has led further. A second thread
does the same with another seed. An order that saves bytes is found quickly but may prevent the best drops, most of
all where the problem is nearly a training step. Choosing which tensors to drop takes slow cooling: hot rounds grow
slowly, so that there are several, and the rounds between them are short. Reheating does not lead from one order to
another, so every other reheated round shakes the order first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Ordering(NamedTuple):
    """A stage of a round of annealing that only reorders runs, in problems without phases.

    ``share``: its share of the round. ``heat``: its first and last temperature. A temperature of 1 is the energy of
    one tensor of mean size that is over the budget at one run. The price of bytes over the budget is constant during
    the stage: if it rose as long as nothing fits, it would freeze the order.
    """

    share: float
    heat: tuple[float, float]


@dataclass(frozen=True)
class CoolingSchedule:
    """The constants of a search by annealing, which is a sequence of rounds: each cools a sequence of runs.

    A *hot* round starts from the order without recomputation, a *reheated* one from the best sequence so far.
    Temperatures are in percent of the cost of running each op once; prices, in runs of mean cost for a tensor of
    mean size that is over the budget at one run; lengths of rounds, in shortest rounds. A field that names no
    measurement was chosen by trial, on the networks of the README and on random layered graphs, without a record.
    """

    reorders: bool
    """Whether the search looks for an order: only without phases, where the order of ``graph.ops`` may be a bad one."""
    last_heat: float
    """The last temperature of a round."""
    shortest: tuple[float, float]
    """Moves per op in the shortest round of small problems, and the number of ops at which it has twice as many per
    op."""
    patience: int
    """A search ends after so many rounds without improvement. They take more than 30 times the shortest round."""

    reheat: float = 0.2
    """The first temperature of a reheated round, as a share of a hot round's."""
    suggested_heat: float = 0.3
    """The first temperature for a sequence that the search for a lower bound suggests, as a share of a hot round's."""
    suggested_share: float = 0.25
    """The share of a reheated round for the suggested sequence. With a half, too little was left for the best
    sequence."""

    gentle_length: int = 4
    """The length of a gentle round, in which the price rises slowly, in lengths of a steep one.

    Gentle rounds lowered the mean overhead of an image and a text tower at a fifth of their activations from 29.3 to
    24.4 % (1.5 million moves, six seeds), and that of U-Net at 0.3 from 14.72 to 14.51 %; others changed within
    scatter.
    """
    rising_share: float = 0.3
    """The share of a gentle round in which the price may rise."""
    rising_factor: float = 1e4
    """The factor by which the price rises over all of ``rising_share``. It starts 50 to some thousand times lower
    than what makes anything fit."""

    growth: float = 1.5
    """Without phases: the factor by which each hot round is longer than the one before."""
    between: float = 0.33
    """Without phases: the length of a reheated round, as a share of the hot round before it."""
    ordering: Ordering = field(default_factory=lambda: Ordering(0.4, (300.0, 1.0)))
    """Without phases: the ordering stage of hot rounds.

    A stage in every hot round made problems that are nearly training steps worse (67 ops: up to 14 and 47 % where
    rounds of both kinds find 7.9 and 40 %), so rounds without one are tried, too.
    """
    loose: float = 1.15
    """Without phases: in every other pair of hot rounds, the order is sought for a budget this many times larger. The
    order with the fewest bytes over the budget itself is nearly always the same, and need not be the one from which
    dropping is cheapest."""
    explored: int = 4
    """Without phases: one of this many hot rounds uses the variant (with an ordering stage, or without) that has not
    led further. With half of them, on random layered graphs none of these came near the others."""
    shake: Ordering = field(default_factory=lambda: Ordering(0.3, (100.0, 1.0)))
    """Without phases: the ordering stage before every other reheated round. What fits is reordered as if it had to
    fit into less; what has become unnecessary is removed. Other reheated rounds stay in their local minimum."""
    shake_budget: float = 0.85
    """Without phases: the share of the budget for which a shake reorders."""
    shaken_price: float = 0.5
    """Without phases: the first price after a shake."""
    prices: tuple[float, float] = (0.1, 10.0)
    """Without phases: the price at the beginning of a stage, and at the end of ``priced_share`` of it. From then on it
    rises as long as nothing fits. At small budgets nothing fits for long; a price that rose all the time would freeze
    the current drops."""
    priced_share: float = 0.9
    """Without phases: the share of a stage in which the price is set; see ``prices``."""
    two_threads: int = 40
    """Without phases: the number of ops from which on a second thread is worth its start."""

    def hot(self, ops: int) -> float:
        """Return the first temperature of a hot round, in percent of the cost of running each op once. ``ops``: the
        number of ops of the problem.

        With phases it is about one op's share of the cost in small problems; in large ones it is less, because there
        is no time to cool down.
        """
        if self.reorders:
            return max(0.1, 30.0 / max(ops, 1))
        return max(0.3, 30.0 / max(ops, 1)) if ops < 600 else 0.1 if ops < 4000 else 0.01

    def length(self, k: int, fits: bool) -> float:
        """Return the length of a round, in shortest rounds.

        Args:
            k: the number of the round, from 0; even ones are hot.
            fits: whether a plan within the budget is known.
        """
        if not self.reorders:
            return self.gentle_length * luby(k // 4) if self.is_gentle(k, fits) else luby(k // 2)
        return float(self.growth ** (k // 2) * (self.between if k % 2 and fits else 1.0))

    def is_gentle(self, k: int, fits: bool) -> bool:
        """Return whether the price of bytes over the budget rises slowly in round ``k`` at first. With phases, every
        other pair of rounds does so once a plan within the budget is known (``fits``); without phases none does."""
        return not self.reorders and k % 4 >= 2 and fits

    def order_budget(self, k: int) -> float:
        """Return the budget for which hot round ``k`` looks for an order, as a multiple of the search's budget."""
        return self.loose if k // 2 % 4 >= 2 else 1.0

    def looks_for_order(self, k: int, with_order: float, without: float) -> bool:
        """Return whether a hot round looks for an order first. With phases none does.

        Without phases, hot rounds with and without this stage alternate until a round with it has ended within the
        budget. Then the variant that has reached the smaller overhead is used, except in every fourth hot round.

        Args:
            k: the number of the round.
            with_order: the least overhead at the end of a hot round that looked for an order; infinite if none ended
                within the budget.
            without: the least overhead at the end of a hot round that did not; infinite if none ended within the
                budget.
        """
        number = k // 2
        if not self.reorders or number < 2 or with_order == float("inf"):
            return self.reorders and number % 2 == 0
        return (with_order <= without) != (number % self.explored == self.explored - 1)


WITH_PHASES = CoolingSchedule(reorders=False, last_heat=0.001, shortest=(75.0, 5000.0), patience=62)
"""The schedule for training steps, and for problems whose order must be kept."""
WITHOUT_PHASES = CoolingSchedule(reorders=True, last_heat=0.003, shortest=(150.0, 1000.0), patience=11)
"""The schedule for other problems. Hot rounds grow, so that fewer rounds take as long."""


def luby(k: int) -> int:
    """Return term k, from 0, of the sequence of Luby, Sinclair and Zuckerman (1993): 1, 1, 2, 1, 1, 2, 4, 1, 1, 2,
    1, 1, 2, 4, 8, ..."""
    term = k + 1
    while term & (term + 1):  # until it is 2^i - 1, the end of a repetition, which is followed by 2^(i-1)
        term -= (1 << term.bit_length() - 1) - 1
    return (term + 1) // 2
