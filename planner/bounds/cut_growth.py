"""Choose where to cut: grow a set of cuts so that the lower bound rises as fast as possible.

Start from the best single cut. The solution of the integer program, written as a sequence of runs, shows where to
cut next: only a cut where this sequence exceeds the budget can change anything. Among those places, the one that
raises the linear relaxation most is tried; if none is clearly best, the one that the network's shape suggests, and
after failures the one where the sequence exceeds the budget most. A cut stays if it raises the integer program. If
several in turn do not, one of them stays anyway, because often only two cuts together do. docs/lower-bound.md has
figures.

A cut inside one of several parallel branches excludes cuts inside the others. Therefore, if time remains, a second
growth follows from the same first cut, with cuts along the chain only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping

from rematplan.planner.bounds.cut_bounds import CutBounds
from rematplan.planner.bounds.cut_places import in_line, prominence
from rematplan.planner.bounds.rounding import bytes_at_first_run

Cuts = tuple[int, ...]

ALONE = 4
"""The number of likely ops that are compared as first cut where maximum flows do not apply."""

FEW = 4
"""The number of prominent ops whose relaxations are compared for the next cut, in addition to the likeliest op."""

FIRST = 1.0
"""Seconds that any integer program may take. Later ones may take as long as was spent before."""

GAIN = 1e-5
"""The least overhead by which a cut must raise a bound to be chosen for it."""

SIBLINGS = 3
"""The number of cuts that are tried with the same other cuts before one that raises nothing stays."""

CLEARLY = 0.005
"""Another op is preferred to the likeliest one only if its relaxation proves more by this share; small differences
between relaxations say nothing about the integer programs."""


class Growth:
    """The growth of a set of cuts, to raise the lower bound of the overhead in ``search``. A *cut* at an op states
    that what is resident at the op's first run fits the budget.

    ``time_limit``: seconds. ``enough``: called between programs with the overhead that is proven so far; returning
    True ends the growth.
    """

    def __init__(self, search: CutBounds, time_limit: float, enough: Callable[[float], bool]) -> None:
        self.search, self.enough = search, enough
        self.began, self.time_limit = time.monotonic(), time_limit
        self._relaxed: dict[Cuts, float] = {}
        self._solved: dict[Cuts, tuple[float, Mapping[int, int]]] = {}
        self._resident: Mapping[int, int] = {
            op: resident for op, resident in search.chain if op in search.places
        }

    def run(self) -> None:
        """Add cuts until the time is up, ``enough`` returned True, or there is nothing left to try."""
        search = self.search
        alone = {cut: search.price(cut) for cut in search.starts if not self.over()}
        if self.over() or not search.graph.base_cost or (search.vast and not search.graph.inverses):
            return
        if search.graph.inverses:
            few = (*search.places[:ALONE], *search.waist)
            alone = {cut: self.relaxed((cut,)) for cut in few if not self.over()}
        if alone:
            start = max(alone, key=lambda cut: alone[cut])
            everywhere, along_the_chain = range(len(search.graph.ops)), dict(search.chain)
            unsolved = [*self.grow((start,), everywhere), *self.grow((start,), along_the_chain)]
            for cuts in dict.fromkeys(reversed(unsolved)):
                if not self.over():
                    self.solve(cuts)

    def grow(self, cuts: Cuts, among: Collection[int]) -> list[Cuts]:
        """Add cuts at ops of ``among`` while likely ones raise the bound. Return the sets of cuts whose programs
        were not solved to the end.

        A program that was not solved to the end gets more time before a cut is added whose relaxation proves no
        more, because the larger program would take even longer. If none of a few cuts raises the bound alone, the
        first of them stays, because often only two cuts together do.
        """
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
            if idle and (failed == SIBLINGS or not likely):
                self.solve(idle)  # known
                cuts, solved, resident = idle, True, self.resident(idle, among)
                tried, idle, failed = tried | set(idle), (), 0
                continue
            if not likely:
                if cuts in again or tried == set(cuts):
                    break
                again.add(cuts)  # a cut that raised nothing with fewer cuts may do so with these
                tried = set(cuts)
                continue
            cut = self.most_lifting(cuts, likely)
            wider = self.wider(cuts, cut)
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
        """Return, for those ops of ``among`` at which a further cut is possible, the bytes resident while each first
        runs.

        They are the bytes of the sequence of runs of the last solution, or of the plan without recomputation before
        there is a solution.
        """
        return {
            op: self._resident[op]
            for op in in_line(self.search.order, cuts)
            if op in among and op in self._resident
        }

    def likely(self, resident: Mapping[int, int], tried: Collection[int], failed: int) -> list[int]:
        """Return the ops to try next as cuts, all of them where the budget is exceeded: the most prominent ones, and
        the first untried one of the places found in advance (``search.places``).

        The latter is first if ``failed`` is 0, else last. Empty if the budget is exceeded nowhere else.

        Args:
            resident: the bytes resident at each op.
            tried: ops to leave out.
            failed: how many cuts in a row have raised nothing.
        """
        over = [max(0, bytes_ - self.search.budget) for bytes_ in resident.values()]
        prominent = dict(zip(resident, prominence(over, over), strict=True)) if over else {}
        left = [op for op in resident if op not in tried and resident[op] > self.search.budget]
        peaks = sorted((op for op in left if prominent[op] > 0), key=lambda op: -prominent[op])
        likeliest = [op for op in self.search.places if op in left][:1]
        ranked = (*peaks[:FEW], *likeliest) if failed else (*likeliest, *peaks[:FEW])
        return list(dict.fromkeys(ranked)) or sorted(left, key=lambda op: -resident[op])[:1]

    def most_lifting(self, cuts: Cuts, likely: list[int]) -> int:
        """Return the op of ``likely`` that, added to ``cuts``, raises the bound of the linear relaxation most, if
        clearly more than the first of ``likely``; else that first op."""
        value = self.relaxed(cuts)
        lifted = {cut: self.relaxed(self.wider(cuts, cut)) for cut in likely if not self.over()}
        best = max(lifted, key=lambda cut: lifted[cut], default=likely[0])
        least = max(value + GAIN, (1 + CLEARLY) * lifted.get(likely[0], value))
        return best if lifted and lifted[best] > least else likely[0]

    def wider(self, cuts: Cuts, cut: int) -> Cuts:
        """Return ``cuts`` with the op ``cut`` added, in the problem's order."""
        return tuple(sorted((*cuts, cut)))

    def relaxed(self, cuts: Cuts) -> float:
        """Return the overhead that the linear relaxation of the program of ``cuts`` proves; solved once per set of
        cuts."""
        if cuts not in self._relaxed:
            self._relaxed[cuts] = self.search.solve(cuts, self.left, integer=False)[0]
        return self._relaxed[cuts]

    def solve(self, cuts: Cuts) -> tuple[float, bool]:
        """Solve the integer program of the set ``cuts``, for at most a share of the time. Return the overhead that
        it proves, and whether more time would prove nothing more.

        For a problem with too many ops for integer programs (``search.vast``), the result is (-inf, True) at once.
        """
        if self.search.vast:
            return -math.inf, True
        if cuts in self._solved:
            proven, self._resident = self._solved[cuts]
            return proven, True
        until = self.spent + min(self.left, max(FIRST, self.spent))
        proven, solved, known = -math.inf, False, -1
        while known < len(self.search.loops) and self.spent < until and not self.over():
            known = len(self.search.loops)  # the loops of this solution are excluded in the next program
            floor, solved = self.search.solve(cuts, until - self.spent, integer=True)
            proven = max(proven, floor)
        if self.search.rounded:
            resident = bytes_at_first_run(self.search.graph, self.search.rounded)
            self._resident = {
                i: resident[op.name] for i, op in enumerate(self.search.graph.ops) if op.name in resident
            }
        if solved:
            self._solved[cuts] = proven, self._resident
        return proven, solved

    @property
    def spent(self) -> float:
        """The seconds since the growth was created."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """The seconds left until the time limit; 0 after it."""
        return max(0.0, self.time_limit - self.spent)

    def over(self) -> bool:
        """Return whether the growth must end: it was stopped, time is up, it is proven that no schedule fits, or
        ``enough`` returned True."""
        best = self.search.best
        return self.search.stopped or not self.left or best.unreachable or self.enough(best.overhead)
