"""Plan a step for a range of sizes of one dimension, so that at each size one of the plans fits, or report the size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.planner.annealing.polish import polished
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.search_rules import SearchRules
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.family.amounts_by_position import Amounts
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.planner.family.range_proof import RangeProof, RangeRow, range_row
from rematplan.plans.size_ranges import ProblemRange, show_sizes

NAMED = 5
"""The largest number of ranges of sizes that an error about sizes without a plan names."""


@dataclass(frozen=True)
class RangeSearchOptions:
    """The constants of the search for plans over a range of sizes. The sizes whose problems have the same ops and
    tensors are a group and searched together; shares are of its time."""

    budgets: int = 5
    """The number of budgets at which the largest size is planned: from the stated budget to just below the peak
    without recomputation, at equal distances."""
    curve_share: float = 0.4
    """The share of the time for plans of the largest size, at several budgets. A plan that fits at the largest size
    mostly fits at smaller ones."""
    fit_share: float = 0.3
    """The share of the time for searches at sizes at which no plan fits yet."""
    searches: int = 6
    """The largest number of searches at sizes at which no plan fits. Each search is meant to halve the number of
    these sizes."""
    starts: int = 12
    """The number of plans, found for other sizes, from which the search at one size starts. `polished` tidies
    at most the same number of plans."""
    polish_seconds: float = 0.1
    """CPU seconds of each short anneal that improves the plans of a size. `PolishOptions` states how good that is."""


OPTIONS = RangeSearchOptions()


@dataclass(frozen=True)
class RangePlan:
    """The known plans for a range of sizes of one dimension."""

    dimension: str
    """The dimension's name."""
    proof: RangeProof[int]
    """For each size, the best known plan and whether it fits."""
    captured: frozenset[int]
    """The sizes at which the step was captured; other problems were interpolated from these."""
    proven: frozenset[int]
    """The sizes at which a lower bound proves that no plan can fit."""
    families: dict[str, PlanFamily]
    """The known plans, by the structure (ops and tensors, without sizes) of their problem."""

    @property
    def members(self) -> int:
        """The number of known plans in all groups of ``families``."""
        return sum(map(len, self.families.values()))

    @property
    def refusal(self) -> str:
        """A message that states at which sizes no known plan fits; empty if a plan fits at every size."""
        unfit, proof = self.proof.unfit, self.proof
        if not unfit:
            return ""
        shown = show_sizes(unfit).split(", ")
        more = f" and {len(shown) - NAMED} more ranges" if len(shown) > NAMED else ""
        smallest = min(row.estimate.peak for row in proof.rows if not row.fits)
        proven = "; it is proven that none can" if self.proven == set(unfit) else ""
        return (
            f"no plan is known within {show_bytes(proof.budget)} at {self.dimension} = {', '.join(shown[:NAMED])}"
            f"{more} ({len(unfit)} of {len(proof.rows)} sizes){proven}; the smallest found at any of these "
            f"is {show_bytes(smallest)} ({smallest} bytes)"
        )


def prove_sizes(problems: ProblemRange, budget: int, store: PlanStore) -> RangePlan:
    """Evaluate the plans of a store at each size of a range, and return for each size the best plan and whether it
    fits."""
    return _RangeSearch(problems, budget, Auto(), silent, store).result()


def plan_range(
    problems: ProblemRange,
    budget: int,
    auto: Auto,
    progress: Progress = silent,
    store: PlanStore | None = None,
) -> RangePlan:
    """Search, at every size of a range, for a plan within ``budget`` bytes, and return the best known plan of each
    size. A size at which none is found raises no error; the result names it. ``store``: has plans to start from; None
    for none."""
    compile_kernels(progress)  # before the clock starts
    # The largest size is first, since its plans mostly fit at smaller sizes; then sizes at which none fits;
    # then short anneals.
    search = _RangeSearch(problems, budget, auto, progress, PlanStore() if store is None else store)
    for sizes in search.groups.values():
        search.plan_group(sizes, auto.time_limit * len(sizes) / len(problems.sizes))
    return search.result()


class _RangeSearch:
    """The search for plans over a range of sizes."""

    def __init__(
        self, problems: ProblemRange, budget: int, auto: Auto, progress: Progress, store: PlanStore
    ) -> None:
        """Group the sizes by the structure of their problems, and take the stored plans of each structure. ``auto``:
        its time limit is for all sizes together."""
        self.problems, self.budget, self.auto, self.progress = problems, budget, auto, progress
        self.families: dict[str, PlanFamily] = {}
        self.amounts: dict[int, Amounts] = {}
        self.structure: dict[int, str] = {}
        #: Sizes by the structure of their problems, ordered by the bytes of all tensors, the largest first.
        self.groups: dict[str, list[int]] = {}
        self.effort = Effort(auto.time_limit)
        for size in problems.sizes:
            structure, self.amounts[size] = problems.amounts(size)
            self.structure[size] = structure
            self.groups.setdefault(structure, []).append(size)
            if structure not in self.families:
                self.families[structure] = store.family(problems.problem(size))
        for sizes in self.groups.values():
            sizes.sort(key=lambda size: self.amounts[size].total, reverse=True)

    def result(self) -> RangePlan:
        """Return the best known plan at each size, whether it fits, and the sizes at which no plan can fit."""
        problems, rows = self.problems, tuple(self.row(size) for size in self.problems.sizes)
        unfit = [row.size for row in rows if not row.fits]
        return RangePlan(
            problems.dimension,
            RangeProof(self.budget, rows),
            frozenset(problems.captured),
            frozenset(size for size in unfit if self.is_impossible(size)),
            self.families,
        )

    def row(self, size: int) -> RangeRow[int]:
        """Return the best known plan at a size, with its peak and cost at that size, and whether it fits the budget."""
        return range_row(self.families[self.structure[size]], self.amounts[size], size, self.budget)

    def is_impossible(self, size: int) -> bool:
        """Return whether a lower bound on the peak proves that no plan fits the budget at a size."""
        return min_peak_bound(self.problems.problem(size)).bytes > self.budget

    def plan_group(self, sizes: Sequence[int], seconds: float) -> None:
        """Search for about ``seconds`` for plans at the ``sizes`` of one group, which begin with the largest, and keep
        the plans. Do nothing if at every size that is not proven impossible a known plan fits without recomputation."""
        effort = Effort(seconds)
        first = next((at for at, size in enumerate(sizes) if not self.is_impossible(size)), len(sizes))
        possible = sizes[first:]
        if not possible or all(
            self.row(size).estimate.reruns == 0 and self.row(size).fits for size in possible
        ):
            return
        self._say(possible[0])
        self._curve(possible[0], OPTIONS.curve_share * seconds)
        share = OPTIONS.curve_share + OPTIONS.fit_share
        self._fit(possible, effort.part(share * seconds - effort.spent()))
        self._polish(possible, effort)

    def _curve(self, size: int, seconds: float) -> None:
        graph, base = self.problems.problem(size), self.row(size).base_peak
        steps = [self.budget + (base - self.budget) * k // OPTIONS.budgets for k in range(OPTIONS.budgets)]
        self._take(size, replace(self.auto, time_limit=seconds).curve(graph, [s for s in steps if s < base]))

    def _fit(self, sizes: Sequence[int], effort: Effort) -> None:
        """Search for a plan at the middle one of the ``sizes``, which begin with the largest, at which no known plan
        fits, and repeat. After a failure, larger sizes are left out. End if none is left, the time is over, or after
        ``searches`` of `OPTIONS`."""
        low = 0
        for _ in range(OPTIONS.searches):
            unfit = [at for at in range(low, len(sizes)) if not self.row(sizes[at]).fits]
            if not unfit or effort.over:
                return
            # A plan that fits there mostly fits at smaller sizes, so half remain.
            at = unfit[len(unfit) // 2]
            graph = self.problems.problem(sizes[at])
            family = self.families[self.structure[sizes[at]]]
            search = replace(self.auto, time_limit=effort.left / 2)
            try:
                plan = search.plan(graph, self.budget, starts=family.plans(graph))
            except InfeasibleBudget as error:
                low = at + 1  # larger sizes are not tried again
                plan = error.plan
            self._take(sizes[at], [plan] if plan else [])

    def _polish(self, sizes: Sequence[int], effort: Effort) -> None:
        """Improve plans that fit and recompute by short anneals until ``effort`` is over, at ``sizes`` in an order that
        spreads them over the range."""
        for at in _spread(len(sizes)):
            if effort.over:
                return
            size = sizes[at]
            if self.row(size).fits and self.row(size).estimate.overhead > 0:
                graph = self.problems.problem(size)
                self._say(size)
                starts = self.families[self.structure[size]].starts(graph, self.budget, OPTIONS.starts)
                seconds, rules = OPTIONS.polish_seconds, SearchRules(self.auto.seed)
                self._take(size, polished(graph, self.budget, starts, seconds=seconds, rules=rules))

    def _take(self, size: int, plans: Iterable[Plan]) -> None:
        graph = self.problems.problem(size)
        for plan in plans:
            self.families[self.structure[size]].add(graph, plan)

    def _say(self, size: int) -> None:
        self.progress(self.effort.share_spent, f"{self.problems.dimension} = {size}")


def _spread(count: int) -> list[int]:
    """Return the numbers below ``count`` so that the first few are spread evenly: 0, 4, 2, 6, 1, 5, 3, 7 for 8."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda n: int(f"{n:0{bits}b}"[::-1], 2))
