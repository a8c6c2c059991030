"""Base class of the strategies `exact_dp` and `approx_dp`: solve the dynamic program of Kusumoto et al. 2019 for
several budgets, and collect the chains of lower sets that it finds."""

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
"""For each objective, which chains are taken from a table of the dynamic program: those with these recomputation times,
as positions in the sorted feasible times (0: the least, 1: the most)."""

WORK = 1.6e10
"""The estimated work, in arbitrary units, that the tables of one formula may take together."""
FEWEST_TABLES = 6
"""The number of tables that are computed even if they exceed ``WORK``, unless fewer are asked for."""


@dataclass(frozen=True)
class DPStrategy(BlockStrategy):
    """Base class of `ExactDP` and `ApproxDP`, which divide the forward into blocks by the dynamic program of Kusumoto
    et al. 2019.

    The dynamic program computes one table for each budget. The first budgets form a geometric progression, from the
    smallest one that any chain of lower sets meets to one that every chain meets. Further budgets are put between
    neighbouring budgets with different chains. A chain meets a budget by the paper's formula of the peak. Since this
    formula ignores that tensors are freed early, the budgets only serve to get different chains; the plans are compared
    by their simulated peaks. The whole computation is done twice: with the paper's formula, and with one that counts no
    bytes for gradients.

    Options: ``objective``: ``time``: take from each table a few chains with little recomputation time; ``memory``: take
    chains with much recomputation time, since their larger blocks allow more early frees. ``ticks``: the resolution of
    recomputation time; the cost of the whole forward is at most this many ticks. ``budgets``: the largest number of
    tables for each of the two formulas. ``max_lower_sets``: the largest number of lower sets that are used.
    """

    objective: Literal["time", "memory"] = "time"
    ticks: int = 400
    budgets: int = 24
    max_lower_sets: int = 1500

    def __post_init__(self) -> None:
        if self.objective not in SHARES:
            raise UsageError(f"{self.name}: objective is {self.objective!r}; it must be time or memory")
        for option in ("ticks", "budgets"):
            if getattr(self, option) < 1:
                raise UsageError(f"{self.name}: {option} is {getattr(self, option)}; it must be at least 1")
        if self.max_lower_sets < 2:
            raise UsageError(f"{self.name}: max_lower_sets is {self.max_lower_sets}; it must be at least 2")

    def lower_sets(self, view: ForwardGraph) -> tuple[int, ...]:
        """Return the lower sets for the dynamic program as bit masks of nodes, sorted by number of nodes, from the
        empty set to the set of all nodes."""
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
        """Return the number of tables to compute for each of the two formulas of the peak: ``budgets``, or fewer (but
        at least `FEWEST_TABLES`) if the estimated work exceeds `WORK`.

        The work is estimated, not timed, so that the same problem always gets the same plans.

        ``masks``: the lower sets of the dynamic program.
        """
        filling = len(masks) ** 2 * self.ticks
        pricing = 4e5 * sum(map(len, view.members))
        return min(self.budgets, max(FEWEST_TABLES, round(WORK / (filling + pricing))))

    def _tables(self, dp: LowerSetDP, count: int) -> Iterator[tuple[Chain, ...]]:
        """Solve the dynamic program for up to ``count`` budgets, and yield the chains of lower sets taken from each
        table.

        The first half of the budgets is in geometric progression. Each later budget is in the middle of the widest
        interval between two neighbouring budgets with different chains.
        """
        least, most = dp.least_budget(), dp.most_budget()
        coarse = max(2, count // 2)
        found: dict[int, tuple[Chain, ...]] = {}
        for i in range(count):
            budget = _geometric(least, most, i, coarse) if i < coarse else _widest(found)
            if budget is None:
                return
            if budget not in found:
                found[budget] = self._chains_at(dp, budget)
                yield found[budget]

    def _chains_at(self, dp: LowerSetDP, budget: int) -> tuple[Chain, ...]:
        """Solve the dynamic program for ``budget`` bytes, and return the chains of lower sets whose recomputation times
        fit the option ``objective``: little time or much (`SHARES`)."""
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
    """Return the budget in the middle of the widest interval (by ratio) between two neighbouring budgets with different
    chains; None if there is none.

    ``found``: the chains of lower sets found for each budget.
    """
    budgets = sorted(found)
    gaps = [
        (high / max(low, 1), (low + high) // 2)
        for low, high in itertools.pairwise(budgets)
        if found[low] != found[high] and high - low > 1
    ]
    return max(gaps)[1] if gaps else None
