"""Where to cut: the growth of a set of cuts, for the bound to rise as much as it can within a time.

From the best single cut on, the next one is looked for where the solution of the integer program, written out as a run
sequence, is over the budget; a cut anywhere else would change nothing. Of the places that stand out there the one that
lifts the linear relaxation most is tried. It stays if it lifts the integer program. docs/lower-bound.md has figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from rematplan.planner.bounds_cuts import prominence
from rematplan.planner.cut_rounding import first_held

if TYPE_CHECKING:
    from rematplan.planner.bounds import BoundSearch

Cuts = tuple[int, ...]

ALONE = 4
"""The likeliest places, of which the growth begins with the best where they cannot be priced."""

FEW = 4
"""Places whose relaxations are compared for the next cut, beside the likeliest one."""

FIRST = 1.0
"""Seconds that any integer program may take; later ones may take as long as has been spent before."""

GAIN = 1e-5
"""What a cut must add, in overhead, to be chosen by it."""


class Growth:
    """The growth of a set of cuts for a search, within a time in seconds.

    ``enough``: asked between programs with the bound so far; True ends it.
    """

    def __init__(self, search: BoundSearch, time_limit: float, enough: Callable[[float], bool]) -> None:
        self.search, self.enough = search, enough
        self.began, self.time_limit = time.monotonic(), time_limit
        self.place = {op: k for k, (op, _) in enumerate(search.chain)}
        self._relaxed: dict[Cuts, float] = {}

    def run(self) -> None:
        """Until the time is up or there is nothing left to try."""
        search = self.search
        alone = {cut: search.price(cut) for cut in search.places if not self.over()}
        if self.over() or not search.graph.base_cost or (search.vast and not search.graph.inverses):
            return
        if search.graph.inverses:
            alone = {cut: self.relaxed((cut,)) for cut in search.places[:ALONE] if not self.over()}
        if alone:
            start = max(alone, key=lambda cut: alone[cut])
            for unfinished in reversed(self.grow((start,))):
                if not self.over():
                    self.solve(unfinished)

    def grow(self, cuts: Cuts) -> list[Cuts]:
        """Add cuts while any that is likely lifts the bound; returns what was cut short."""
        unsolved = [] if self.solve(cuts) else [cuts]
        held, tried = self.overfull(), set(cuts)
        while not self.over() and (likely := self.likely(held, tried)):
            before = self.search.best.overhead
            cut = self.most_lifting(cuts, likely)
            tried.add(cut)
            wider = self.wider(cuts, cut)
            if not self.solve(wider):
                unsolved.append(wider)
            if self.search.best.overhead > before + GAIN:
                cuts, tried = wider, set(wider)
                if self.search.rounded:
                    held = self.overfull()
        return unsolved

    def overfull(self) -> Mapping[int, int]:
        """Ops of the chain to cut at, with what is held there: those over the budget in the last program's solution;
        where it has none, the places chosen before."""
        search = self.search
        if not search.rounded:
            return {op: bytes_ for op, bytes_ in search.chain if op in search.places}
        held = first_held(search.graph, search.rounded)
        names = {op: search.graph.ops[op].name for op in self.place}
        return {op: held[name] for op, name in names.items() if held[name] > search.budget}

    def likely(self, held: Mapping[int, int], tried: Collection[int]) -> list[int]:
        """The few of them that stand out most, and the one that the network's shape makes likeliest."""
        left = [op for op in held if op not in tried]
        over = [max(0, held.get(op, 0) - self.search.budget) for op in self.place]
        prominent = prominence(over, over)
        peaks = [op for op in left if prominent[self.place[op]] > 0]
        peaks.sort(key=lambda op: -prominent[self.place[op]])
        likeliest = [op for op in self.search.places if op in left][:1]
        return list(dict.fromkeys((*likeliest, *peaks[:FEW]))) or sorted(left, key=lambda op: -held[op])[:1]

    def most_lifting(self, cuts: Cuts, likely: list[int]) -> int:
        """The one that lifts the relaxation most; the first if none lifts it."""
        value = self.relaxed(cuts)
        lifted = {cut: self.relaxed(self.wider(cuts, cut)) for cut in likely if not self.over()}
        best = max(lifted, key=lambda cut: lifted[cut], default=likely[0])
        return best if lifted and lifted[best] > value + GAIN else likely[0]

    def wider(self, cuts: Cuts, cut: int) -> Cuts:
        """The cuts and one more, in the chain's order."""
        return tuple(sorted((*cuts, cut), key=lambda op: self.place[op]))

    def relaxed(self, cuts: Cuts) -> float:
        """What the linear relaxation proves."""
        if cuts not in self._relaxed:
            self._relaxed[cuts] = self.search.solve(cuts, self.left, integer=False)[0]
        return self._relaxed[cuts]

    def solve(self, cuts: Cuts) -> bool:
        """Solve the integer program, within a share of the time; whether it is solved."""
        limit = min(self.left, max(FIRST, self.spent))
        return not self.search.vast and self.search.solve(cuts, limit, integer=True)[1]

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.time_limit - self.spent)

    def over(self) -> bool:
        """Whether to go on is of no use."""
        best = self.search.best
        return self.search.stopped or not self.left or best.unreachable or self.enough(best.overhead)
