"""Base class of `exact_dp` and `approx_dp`: chains of the dynamic program of Kusumoto et al. 2019 at several
budgets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rematplan.ir import UsageError
from rematplan.planner.blocks.forward_graph import ForwardGraph
from rematplan.planner.blocks.lower_set_dp import LowerSetDP, prepare
from rematplan.planner.core.strategy import Progress
from rematplan.planner.strategies.block_strategy import BlockStrategy, Chain

SHARES = {"time": (0.0, 0.02, 0.05, 0.1, 0.2, 0.4), "memory": (1.0, 0.95, 0.9, 0.75, 0.6, 0.4)}
"""For each objective, which chains are taken from a table of the dynamic program: those with these recomputation times.
They are positions in the sorted feasible times (0: the least, 1: the most)."""

WORK = 1.6e10
"""The estimated work, in arbitrary units, that the tables of one formula may take together."""
FEWEST_TABLES = 6
"""The number of tables that are computed even if they exceed ``WORK``, unless fewer are asked for."""


@dataclass(frozen=True)
class DPStrategy(BlockStrategy):
    """Base class of `ExactDP` and `ApproxDP`: blocks by the dynamic program of Kusumoto et al. 2019, one
    table per budget.

    The formula of the peak ignores early frees, so budgets serve to get different chains; plans are compared
    by simulation.
    """

    objective: Literal["time", "memory"] = "time"
    """``time``: chains with little recomputation. ``memory``: with much, since their larger blocks allow more
    early frees.
    """
    ticks: int = 400
    """The resolution of time: the forward's cost is at most this many ticks."""
    budgets: int = 24
    """The most tables for each of the two formulas, with and without gradients."""
    max_lower_sets: int = 1500
    """The most lower sets that are used."""

    def __post_init__(self) -> None:
        if self.objective not in SHARES:
            raise UsageError(f"{self.name}: objective is {self.objective!r}; it must be time or memory")
        for option in ("ticks", "budgets"):
            if getattr(self, option) < 1:
                raise UsageError(f"{self.name}: {option} is {getattr(self, option)}; it must be at least 1")
        if self.max_lower_sets < 2:
            raise UsageError(f"{self.name}: max_lower_sets is {self.max_lower_sets}; it must be at least 2")

    def lower_sets(self, view: ForwardGraph) -> tuple[int, ...]:
        """Return the lower sets as bit masks, by rising number of nodes, from ∅ to all nodes."""
        raise NotImplementedError

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Yield the chains of lower sets taken from all tables of the dynamic program, for all budgets and both
        formulas of the peak."""
        masks = self.lower_sets(view)
        # Only if the last block is charged, as in the paper, does the largest time belong to the coarsest chain.
        charge_last = self.objective == "memory"
        count = self._affordable(view, masks)
        tables = (
            chains
            for gradients in (True, False)
            for chains in self._tables(prepare(view, masks, self.ticks, charge_last, gradients), count)
        )
        for at, chains in enumerate(tables, 1):
            for chain in chains:
                progress(at / (2 * count), f"{len(masks)} lower sets, table {at} of {2 * count}")
                yield chain

    def _affordable(self, view: ForwardGraph, masks: tuple[int, ...]) -> int:
        """Return the number of tables for each formula: ``budgets``, or fewer, but not below `FEWEST_TABLES`, if the
        estimated work exceeds `WORK`."""
        # Estimated, not timed, so that a problem always gets the same plans.
        filling = len(masks) ** 2 * self.ticks
        pricing = 4e5 * sum(map(len, view.members))
        return min(self.budgets, max(FEWEST_TABLES, round(WORK / (filling + pricing))))

    def _tables(self, dp: LowerSetDP, count: int) -> Iterator[tuple[Chain, ...]]:
        """Yield, for each of up to ``count`` budgets, the chains taken from its table. Fewer budgets are tried if all
        neighbouring ones have equal chains or differ by one byte."""
        least, most = dp.least_budget(), dp.most_budget()
        coarse = max(2, count // 2)
        found: dict[int, tuple[Chain, ...]] = {}
        for i in range(count):
            # Half in geometric progression; later ones halve the widest interval between budgets with
            # different chains.
            budget = _geometric(least, most, i, coarse) if i < coarse else _widest(found)
            if budget is None:
                return
            if budget not in found:
                found[budget] = self._chains_at(dp, budget)
                yield found[budget]

    def _chains_at(self, dp: LowerSetDP, budget: int) -> tuple[Chain, ...]:
        """Return the chains within ``budget`` bytes with little or much recomputation time, by ``objective``
        (`SHARES`).
        """
        table = dp.solve(budget)
        times = table.times()
        picks = dict.fromkeys(
            times[round(share * (len(times) - 1))] for share in SHARES[self.objective] if times
        )
        return tuple(table.chain(t) for t in picks)


def _geometric(least: int, most: int, i: int, count: int) -> int:
    """Return number ``i`` of ``count`` budgets in geometric progression from ``least`` to ``most``; 0 if ``least`` is
    0."""
    return least if least == 0 else round(least * (most / least) ** (i / (count - 1)))


def _widest(found: dict[int, tuple[Chain, ...]]) -> int | None:
    """Return the budget in the middle of the widest interval, by ratio, between budgets with different
    chains; None if there is none.
    """
    budgets = sorted(found)
    gaps = [
        (high / max(low, 1), (low + high) // 2)
        for low, high in itertools.pairwise(budgets)
        if found[low] != found[high] and high - low > 1
    ]
    return max(gaps)[1] if gaps else None
