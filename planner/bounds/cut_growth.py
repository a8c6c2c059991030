"""Choose a set of cuts: add one cut after another, so that the proven lower bound of the overhead rises quickly.

A *cut* at an op is the constraint that the bytes resident at the op's first execution fit the budget. The first cut
is the one that alone proves most. Then the integer program of the cuts so far is solved, and its solution is
converted to an order of execution. A further cut can raise the bound only at an op where this order exceeds the
budget.

A few such ops are ranked. At the top is an op that `cut_candidates` chose from the network's shape or, after a cut that
did not raise the bound, the op where the excess is most prominent. The op at the top is tried, unless the linear
relaxation proves clearly more with another of the few. A cut stays if it raises the bound of the integer program. If
several cuts in a row do not raise it, the first of these cuts whose program was solved to the end is added anyway,
because often only two cuts together raise the bound. docs/lower-bound.md has figures.

A cut inside one of several parallel branches excludes cuts inside the other branches, because one cut must precede
the other. Therefore, if time remains, a second set of cuts is grown from the same first cut, only with ops of the
network's heaviest chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from rematplan.planner.bounds.cut_bounds import CutBounds
from rematplan.planner.bounds.cut_places import in_line, prominence
from rematplan.planner.bounds.rounding import bytes_at_first_run
from rematplan.planner.core.effort import Effort

Cuts = tuple[int, ...]

ALONE = 4
"""The number of promising ops that are compared as first cut in problems with inverses, where maximum flows do not
apply."""

FEW = 4
"""The number of prominent ops whose linear relaxations are compared for the next cut."""

FIRST = 1.0
"""Seconds that any integer program may take. A later one may take as many seconds as were spent before it."""

GAIN = 1e-5
"""The least increase of the proven overhead for which a cut is added."""

SIBLINGS = 3
"""After so many cuts in a row that did not raise the bound, the first of these cuts whose integer program was solved to
the end is added anyway."""

CLEARLY = 0.005
"""Another op is preferred to the likeliest one only if its linear relaxation proves more by this share. Small
differences between relaxations say nothing about the integer programs."""


class Growth:
    """Adds cuts to a set, to raise the lower bound of the overhead in ``search``. A *cut* at an op is the constraint
    that the bytes resident at the op's first execution fit the budget.

    ``effort``: what the growth may spend. ``enough``: the growth ends when it returns True. It is called repeatedly,
    with the overhead that is proven so far.
    """

    def __init__(self, search: CutBounds, effort: Effort, enough: Callable[[float], bool]) -> None:
        self.search, self.effort, self.enough = search, effort, enough
        self._relaxed: dict[Cuts, float] = {}
        self._solved: dict[Cuts, tuple[float, Mapping[int, int]]] = {}
        self._resident: Mapping[int, int] = {
            op: resident for op, resident in search.chain if op in search.places
        }

    def run(self) -> None:
        """Compute the bounds that a few cuts prove alone. Then add further cuts to the one with the highest bound,
        until time is up, ``enough`` returns True, or there is nothing left to try. The bounds are recorded in
        ``search``.

        No cuts are added if no op has a cost, or if the problem is very large (``search.vast``) and has no inverses.
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
            everywhere, along_the_chain = range(len(search.graph.ops)), dict(search.chain)
            unsolved = [*self.grow((start,), everywhere), *self.grow((start,), along_the_chain)]
            for cuts in dict.fromkeys(reversed(unsolved)):
                if not self.over():
                    self.solve(cuts)

    def grow(self, cuts: Cuts, among: Collection[int]) -> list[Cuts]:
        """Add cuts at ops of ``among`` to the set ``cuts`` one by one, as long as this raises the proven lower bound of
        the overhead. The bounds are recorded in ``search``; the enlarged set itself is not returned. Return the sets of
        cuts whose integer programs were not solved to the end.

        If the program of the set so far was not solved to the end, it gets more time before a further cut is tried. The
        exception is a further cut with which the linear relaxation already proves more than the program of the set so
        far. If `SIBLINGS` cuts in a row do not raise the bound, or no op is left to try, the first of these cuts whose
        program was solved to the end is added anyway, because often only two cuts together raise the bound.

        ``cuts``, ``among``: positions of ops in ``graph.ops``.
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
        """Return, for each op of ``among`` at which a further cut is possible, the bytes resident at the op's first
        execution. Ops are positions in ``graph.ops``.

        The bytes are those in the order of execution that the last integer solution describes. Before there is a
        solution, they are those in the order without recomputation, for the ops of ``search.places`` only. A further
        cut is possible at an op that every schedule runs and that must precede or follow each op of ``cuts``.
        """
        return {
            op: self._resident[op]
            for op in in_line(self.search.order, cuts)
            if op in among and op in self._resident
        }

    def likely(self, resident: Mapping[int, int], tried: Collection[int], failed: int) -> list[int]:
        """Return the ops to try next as cuts, as positions in ``graph.ops``. At all of them the resident bytes exceed
        the budget.

        They are the `FEW` ops where the excess is most prominent, and one op of ``search.places``, which were chosen
        from the network's shape: the first of these that exceeds the budget and is not in ``tried``. That op comes
        first if ``failed`` is 0, else last. If there is none of either kind, the result is the untried op with the most
        resident bytes. The result is empty if no untried op exceeds the budget.
        """
        over = [max(0, bytes_ - self.search.budget) for bytes_ in resident.values()]
        prominent = dict(zip(resident, prominence(over, over), strict=True)) if over else {}
        left = [op for op in resident if op not in tried and resident[op] > self.search.budget]
        peaks = sorted((op for op in left if prominent[op] > 0), key=lambda op: -prominent[op])
        likeliest = [op for op in self.search.places if op in left][:1]
        ranked = (*peaks[:FEW], *likeliest) if failed else (*likeliest, *peaks[:FEW])
        return list(dict.fromkeys(ranked)) or sorted(left, key=lambda op: -resident[op])[:1]

    def most_lifting(self, cuts: Cuts, likely: list[int]) -> int:
        """Return the op of ``likely`` that is to be added to ``cuts``.

        It is the op with which the linear relaxation proves the highest overhead, if that is clearly more (`CLEARLY`)
        than with the first op of ``likely``, and more than with ``cuts`` alone. Else it is the first op of ``likely``.
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
        """Solve the integer program of the set ``cuts``. Return the overhead that it proves, and whether more time
        would prove nothing more.

        The program gets as much effort as was spent on the growth before, at least `FIRST`, at most what is left. If a
        solution contains loops (tensors computed only from each other), the program is solved again without them. The
        bytes resident in the solution are recorded for `resident`. For a problem with too many ops for integer programs
        (``search.vast``), the result is (-inf, True) at once.
        """
        if self.search.vast:
            return -math.inf, True
        if cuts in self._solved:
            proven, self._resident = self._solved[cuts]
            return proven, True
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
