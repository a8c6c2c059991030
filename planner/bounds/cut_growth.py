"""Choose a set of cuts one by one, so that the proven lower bound of the overhead rises quickly.

The first cut proves the most alone. A further one can help where the program's solution, as an order of
execution, exceeds the budget; it stays if it raises the bound. docs/lower-bound.md has figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from rematplan.planner.bounds.cut_bounds import CutBounds
from rematplan.planner.bounds.cut_places import in_line, prominence
from rematplan.planner.bounds.runs_of_solution import bytes_at_first_run
from rematplan.planner.core.effort import Effort

Cuts = tuple[int, ...]

ALONE = 4
"""The number of promising ops that are compared as first cut in problems with inverses, where maximum flows do not
apply."""

FEW = 4
"""The number of prominent ops whose linear relaxations are compared for the next cut."""

BACK = 0.3
"""The share of the effort for the search back in time."""

FIRST = 1.0
"""Seconds that any integer program may take. A later one may take as many seconds as were spent before it."""

GAIN = 1e-5
"""The least increase of the proven overhead for which a cut is added."""

SIBLINGS = 3
"""After so many cuts in a row that did not raise the bound, one is added anyway: the first whose integer program was
solved to the end."""

CLEARLY = 0.005
"""Another op is preferred to the likeliest one only if its linear relaxation proves more by this share. Small
differences between relaxations say nothing about the integer programs."""


class Growth:
    """Adds cuts to a set, to raise the lower bound in ``search``."""

    def __init__(self, search: CutBounds, effort: Effort, enough: Callable[[float], bool]) -> None:
        # ``enough``: with the overhead proven so far, whether the growth may end.
        self.search, self.effort, self.enough = search, effort, enough
        self._relaxed: dict[Cuts, float] = {}
        self._solved: dict[Cuts, tuple[float, Mapping[int, int]]] = {}
        self._resident: Mapping[int, int] = {
            op: resident for op, resident in search.chain if op in search.places
        }

    def run(self) -> None:
        """Compute the bounds of single cuts, then search back in time and add cuts to the best one. The bounds are
        recorded in ``search``.

        Only single cuts are tried without costs, and without inverses in problems of more than `cut_bounds.VAST` ops.
        With inverses there is no search back in time.
        """
        search = self.search
        alone = {cut: search.price(cut) for cut in search.starts if not self.over()}
        if self.over() or not search.graph.base_cost or (search.vast and not search.graph.inverses):
            return
        if search.graph.inverses:
            few = (*search.places[:ALONE], *search.waist)
            alone = {cut: self.relaxed((cut,)) for cut in few if not self.over()}
        if alone:
            start = max(alone, key=lambda cut: alone[cut])
            if not search.graph.inverses:
                part = self.effort.part(BACK * self.effort.total, lambda: search.stopped)
                search.search_back(start, part)
            everywhere, along_the_chain = range(len(search.graph.ops)), dict(search.chain)
            # Cuts in one of several parallel branches exclude cuts in the others, so a second set grows along
            # the chain alone.
            unsolved = [*self.grow((start,), everywhere), *self.grow((start,), along_the_chain)]
            for cuts in dict.fromkeys(reversed(unsolved)):
                if not self.over():
                    self.solve(cuts)

    def grow(self, cuts: Cuts, among: Collection[int]) -> list[Cuts]:
        """Add ops of ``among`` as cuts to ``cuts``: those that raise the bound. After `SIBLINGS` in a row that did not,
        also add the first of these whose program was solved to the end. Return the sets whose programs were not solved
        to the end."""
        if self.over():
            return []
        proven, solved = self.solve(cuts)
        unsolved = [] if solved else [cuts]
        resident, tried = self.resident(cuts, among), set(cuts)
        idle: Cuts = ()
        again: set[Cuts] = set()
        failed = 0
        while not self.over():
            likely = self.likely(resident, tried, failed)
            # Often two cuts raise the bound that neither raises alone.
            if idle and (failed >= SIBLINGS or not likely):
                self.solve(idle)  # solved before; sets the resident bytes again
                cuts, solved, resident = idle, True, self.resident(idle, among)
                tried, idle, failed = tried | set(idle), (), 0
                continue
            if not likely:
                if cuts in again or tried == set(cuts):
                    break
                again.add(cuts)  # a cut that raised nothing may raise the bound with more cuts
                tried = set(cuts)
                continue
            cut = self.most_lifting(cuts, likely)
            wider = self.wider(cuts, cut)
            # More time for the program of the set so far, unless the relaxation with the further cut proves
            # more.
            if not solved and self.relaxed(wider) <= proven:
                more, solved = self.solve(cuts)
                proven, resident = max(proven, more), self.resident(cuts, among)
                continue
            tried.add(cut)
            lifted, done = self.solve(wider)
            if not done:
                unsolved.append(wider)
            if lifted > proven + GAIN:
                cuts, proven, solved, resident = wider, lifted, done, self.resident(wider, among)
                tried, idle, failed = set(wider), (), 0
            else:
                idle, failed = idle or (wider if done else ()), failed + 1
        return unsolved

    def resident(self, cuts: Cuts, among: Collection[int]) -> Mapping[int, int]:
        """Return, by position, the bytes resident at the first run of ops of ``among``. There are only ops that must
        run, must precede or follow each of ``cuts``, and have known bytes."""
        # In the last integer solution's order; before there is one, in that without recomputation, for
        # `places` alone.
        return {
            op: self._resident[op]
            for op in in_line(self.search.order, cuts)
            if op in among and op in self._resident
        }

    def likely(self, resident: Mapping[int, int], tried: Collection[int], failed: int) -> list[int]:
        """Return untried ops over the budget to try as cuts: the `FEW` most prominent, and one of ``search.places``,
        which is first if ``failed`` is 0.

        If there is none of either, return the op over the budget with the most resident bytes, if any.
        """
        over = [max(0, bytes_ - self.search.budget) for bytes_ in resident.values()]
        prominent = dict(zip(resident, prominence(over, over), strict=True)) if over else {}
        left = [op for op in resident if op not in tried and resident[op] > self.search.budget]
        peaks = sorted((op for op in left if prominent[op] > 0), key=lambda op: -prominent[op])
        likeliest = [op for op in self.search.places if op in left][:1]
        ranked = (*peaks[:FEW], *likeliest) if failed else (*likeliest, *peaks[:FEW])
        return list(dict.fromkeys(ranked)) or sorted(left, key=lambda op: -resident[op])[:1]

    def most_lifting(self, cuts: Cuts, likely: list[int]) -> int:
        """Return the op of ``likely`` to add: the one whose relaxation proves clearly the most (`CLEARLY`),
        else the first.
        """
        value = self.relaxed(cuts)
        lifted = {cut: self.relaxed(self.wider(cuts, cut)) for cut in likely if not self.over()}
        best = max(lifted, key=lambda cut: lifted[cut], default=likely[0])
        least = max(value + GAIN, (1 + CLEARLY) * lifted.get(likely[0], value))
        return best if lifted and lifted[best] > least else likely[0]

    def wider(self, cuts: Cuts, cut: int) -> Cuts:
        """Return ``cuts`` with the op ``cut`` added, in ascending order of positions in ``graph.ops``."""
        return tuple(sorted((*cuts, cut)))

    def relaxed(self, cuts: Cuts) -> float:
        """Return the overhead that the linear relaxation of the integer program of ``cuts`` proves. The result is
        cached for each set of cuts."""
        if cuts not in self._relaxed:
            self._relaxed[cuts] = self.search.solve(cuts, self.effort, integer=False)[0]
        return self._relaxed[cuts]

    def solve(self, cuts: Cuts) -> tuple[float, bool]:
        """Solve the integer program of ``cuts``, unless it was solved to the end before. Return the overhead that it
        proves (-inf if nothing), and whether more time would prove nothing more. If it has a solution, that determines
        what `resident` returns.

        For more than `cut_bounds.VAST` ops nothing is solved: return (-inf, True).
        """
        if self.search.vast:
            return -math.inf, True
        if cuts in self._solved:
            proven, self._resident = self._solved[cuts]
            return proven, True
        # As much effort as was spent before, at least `FIRST`.
        effort = self.effort.part(max(self.effort.of(FIRST), self.effort.spent()))
        proven, solved, known = -math.inf, False, -1
        while known < len(self.search.loops) and not effort.over and not self.over():
            known = len(self.search.loops)  # loops of this solution are excluded from the next program
            floor, solved = self.search.solve(cuts, effort, integer=True)
            proven = max(proven, floor)
        if self.search.rounded:
            resident = bytes_at_first_run(self.search.graph, self.search.rounded)
            self._resident = {
                i: resident[op.name] for i, op in enumerate(self.search.graph.ops) if op.name in resident
            }
        if solved:
            self._solved[cuts] = proven, self._resident
        return proven, solved

    def over(self) -> bool:
        """Return whether the growth must end: it was stopped, time is up, it is proven that no schedule fits, or
        ``enough`` returned True."""
        best = self.search.best
        return self.search.stopped or self.effort.over or best.unreachable or self.enough(best.overhead)
