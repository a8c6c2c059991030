"""Base class of `exact_dp` and `approx_dp`: from budgets of the paper's formula to chains."""

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
"""By objective, the recomputation times at which chains are taken from a table, as shares of the range of its
feasible times."""

WORK = 1.6e10
FEWEST_TABLES = 6


@dataclass(frozen=True)
class DPStrategy(BlockStrategy):
    """Base class of `ExactDP` and `ApproxDP`: chains of lower sets by the dynamic program of Kusumoto et al. 2019.

    The program is solved for a grid of budgets, from the smallest feasible one up, refined where the chains differ.
    The paper's formula of the peak ignores that tensors are freed early, so these budgets only serve to get
    different chains; their plans are compared by simulated peaks. The search runs twice, with the paper's formula
    and with one that charges no gradients.

    Options: ``objective``: ``time``: take from each table the chains with the least recomputation time; ``memory``:
    take the chains with the most, whose coarser blocks need less memory. ``ticks``: the number of steps into which
    recomputation time is divided. ``budgets``: the largest number of tables for each formula. ``max_lower_sets``: the
    largest number of lower sets that are used.
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
        """Return the lower sets to use as bit masks, by number of nodes, ∅ and the set of all nodes included."""
        raise NotImplementedError

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Yield the chains of lower sets that all tables give."""
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
        """Return the number of tables per formula: ``budgets``, or fewer if the problem is so large that they would
        take long.

        The work is estimated, not timed, so that the same problem always gets the same plans.
        """
        filling = len(masks) ** 2 * self.ticks
        pricing = 4e5 * sum(map(len, view.members))
        return min(self.budgets, max(FEWEST_TABLES, round(WORK / (filling + pricing))))

    def _tables(self, dp: LowerSetDP, count: int) -> Iterator[tuple[Chain, ...]]:
        """Yield chains for a coarse grid of budgets, then for the middle of the widest gap between budgets whose
        chains differ."""
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
        table = dp.solve(budget)
        times = table.times()
        picks = dict.fromkeys(
            times[round(share * (len(times) - 1))] for share in SHARES[self.objective] if times
        )
        return tuple(table.chain(t) for t in picks)


def _geometric(least: int, most: int, i: int, count: int) -> int:
    return least if least == 0 else round(least * (most / least) ** (i / (count - 1)))


def _widest(found: dict[int, tuple[Chain, ...]]) -> int | None:
    budgets = sorted(found)
    gaps = [
        (high / max(low, 1), (low + high) // 2)
        for low, high in itertools.pairwise(budgets)
        if found[low] != found[high] and high - low > 1
    ]
    return max(gaps)[1] if gaps else None
