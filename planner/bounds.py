"""Proven floors: of the overhead of any schedule within a budget, and of the peak of any schedule at all.

They hold for every order of the ops, any number of runs of each, and frees anywhere. docs/lower-bound.md has
the proofs. Only the solver's dual bound is used, never the value of a solution it found, less a margin for
its arithmetic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds_cuts import cut_candidates, heaviest_chain, precedence, working_set
from rematplan.planner.bounds_flow import flow_bound
from rematplan.planner.bounds_model import COST_UNIT, CutProgram
from rematplan.planner.memo import remember
from rematplan.planner.plan import Plan
from rematplan.planner.solver import Solver

MARGIN = 0.01
"""Subtracted from a solver's dual bound, in cost units: its tolerance on reduced costs, 1e-7, times 10^5
variables."""

GAP = 0.05
"""Within which integer programs are solved, in cost units."""

ROUNDING = 1e-9
"""Subtracted from a priced cut: its sums are of floats."""

TINY = 1e-5
"""Share of the budget up to which a tensor is taken to be resident always, in problems of more than `LARGE`
ops."""
LARGE = 200
PLACES = 24
"""Places along the network at which cuts are tried."""

ALONE = 4
"""The likeliest of them, of which the growth begins with the best where they cannot be priced."""

FIRST = 1.0
"""Seconds that any integer program may take; later ones may take as long as has been spent before."""

SCREENING = 0.3
"""Share of the time for the linear relaxations that choose the cuts."""

GAIN = 1e-5
"""What a cut must add to a relaxation, in overhead, to be chosen by it."""

VAST = 3000
"""Ops beyond which no integer programs are solved: one of this size may prove nothing for a minute."""
VAST_PLACES = 8

DENSE = 5000
"""Cuts times ops up to which many cuts at once are tried."""

CLOSED = 1e-6
"""A gap of this much overhead counts as closed: ten thousandths of a percent of the base cost."""


@dataclass(frozen=True, slots=True)
class Bound:
    """``overhead``: no schedule within the budget has less; infinite if it is proven that there is none."""

    overhead: float

    @property
    def unreachable(self) -> bool:
        """Whether it is proven that no schedule fits the budget."""
        return self.overhead == math.inf


class BoundSearch:
    """The search for a bound at one budget; it can be asked, and told to stop, from another thread.

    First each of a few places is cut on its own, priced by maximum flows. From the best of them a set of cuts grows
    by those that lift the linear relaxation most, then by those that lift the integer program; small problems are cut
    at every op too. What was proven for a budget holds for smaller ones, and is remembered for them.
    """

    def __init__(self, graph: TrainingGraph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.order = precedence(graph)
        self.chain = heaviest_chain(graph, self.order)
        self.quantum = _quantum(graph)
        self._vast = len(graph.ops) > VAST
        self.places = cut_candidates(graph, self.chain, VAST_PLACES if self._vast else PLACES)
        self.turn = self.places[0] if self.places else -1
        self._proven: dict[int, float] = remember(graph, "bounds", dict)
        known = [floor for larger, floor in self._proven.items() if larger >= budget]
        least = math.inf if budget < min_peak_bound(graph).bytes else self._floor()
        self.best = Bound(max([least, *known]))
        self._stopped = False
        self._solver = Solver()

    def run(self, time_limit: float, enough: Callable[[float], bool] = lambda _: False) -> Bound:
        """Work for up to ``time_limit`` seconds; returns, and keeps, the best bound.

        ``enough``: asked between programs with the bound so far; True ends the search.
        """
        with Solver() as self._solver:
            _Growth(self, time_limit, enough).run()
        return self.best

    def price(self, cut: int) -> float:
        """Take in the bound of the cut at a needed op, quickly, and return it; with inverses there is none."""
        if not self.graph.base_cost or self.graph.inverses:
            return -1.0
        found = flow_bound(self.graph, self.order, cut, self.budget)
        self._raise(found - ROUNDING)
        return found

    def _raise(self, overhead: float) -> None:
        """Take a proven floor in; infinite if no schedule fits."""
        floor = self._rounded_up(overhead) if math.isfinite(overhead) else overhead
        self.best = Bound(max(self.best.overhead, floor))
        self._proven[self.budget] = self.best.overhead

    def reached(self, overhead: float) -> bool:
        """Whether an overhead is as low as the bound, within what counts as closed."""
        return overhead <= self.best.overhead + CLOSED

    def closed(self, plan: Plan | None) -> bool:
        """Whether the plan is proven optimal; with none, whether it is proven that there is none."""
        return self.reached(math.inf if plan is None else plan.estimate.overhead)

    def stop(self) -> None:
        """End the search at once; what the program being solved would have proven is lost."""
        self._stopped = True
        self._solver.stop()

    @property
    def stopped(self) -> bool:
        """Whether it has been told to."""
        return self._stopped

    def _floor(self) -> float:
        """Every needed op runs once."""
        needed = (op.cost for i, op in enumerate(self.graph.ops) if self.order.needed >> i & 1)
        return math.fsum(needed) / self.graph.base_cost - 1 if self.graph.base_cost else 0.0

    def solve(self, cuts: Sequence[int], seconds: float, *, integer: bool) -> tuple[float, bool]:
        """Solve the program of these cuts, or its relaxation, and take its bound in.

        Returns the overhead that it proves and whether there is no more to learn from it.
        """
        tiny = int(TINY * (self.budget - self.graph.input_bytes)) if len(self.graph.ops) > LARGE else 0
        rows = CutProgram(self.graph, self.order, cuts, self.budget, tiny).rows
        if rows.impossible:
            self._raise(math.inf)
            return math.inf, True
        if not rows.cost:
            return self.best.overhead, True
        answer = self._solver.solve(rows, seconds, integer=integer, gap=GAP)
        proven = answer.dual
        if math.isfinite(proven):
            proven = (proven + rows.constant - MARGIN) * COST_UNIT - 1
        self._raise(proven)
        return proven, answer.done

    def _rounded_up(self, overhead: float) -> float:
        """The least overhead not below this one that sums of the ops' costs can have."""
        if not self.quantum:
            return overhead
        steps = math.ceil((overhead + 1) * self.graph.base_cost / self.quantum - 1e-3)
        return steps * self.quantum / self.graph.base_cost - 1


class _Growth:
    """The growth of a set of cuts within a time."""

    def __init__(self, search: BoundSearch, time_limit: float, enough: Callable[[float], bool]) -> None:
        self.search, self.enough = search, enough
        self.began, self.time_limit = time.monotonic(), time_limit
        self.integer = not search._vast
        self.place = {op: k for k, (op, _) in enumerate(search.chain)}

    def run(self) -> None:
        """Until the time is up or there is nothing left to try."""
        search = self.search
        alone = {cut: search.price(cut) for cut in search.places if not self.over()}
        if self.over() or not search.graph.base_cost or (search._vast and not search.graph.inverses):
            return
        if search.graph.inverses:
            alone = {cut: self.relaxed((cut,)) for cut in search.places[:ALONE] if not self.over()}
        if alone:
            start = max(alone, key=lambda cut: alone[cut])
            self.solve((start,))
            unsolved = [*self.by_integers(self.by_relaxations((start,), alone[start])), *self.by_density()]
            for unfinished in reversed(unsolved):
                if not self.over():
                    self.solve(unfinished)

    def by_relaxations(self, cuts: tuple[int, ...], value: float) -> tuple[int, ...]:
        """The cuts, and those added while the relaxation gains."""
        gains = dict.fromkeys((c for c in self.search.places if c not in cuts), math.inf)
        while gains and not self.over():
            best = self.most_gain(cuts, value, gains)
            if gains[best] <= GAIN:
                break
            value += gains.pop(best)
            cuts = self.wider(cuts, best)
            self.solve(cuts)
        return cuts

    def most_gain(self, cuts: tuple[int, ...], value: float, gains: dict[int, float]) -> int:
        """The cut that adds most, in the hope that none adds more than it did to fewer cuts; ``gains`` are renewed."""
        fresh: set[int] = set()
        while (best := max(gains, key=lambda cut: gains[cut])) not in fresh:
            late = self.over() or self.spent > SCREENING * self.time_limit
            gains[best] = 0.0 if late else self.relaxed(self.wider(cuts, best)) - value
            fresh.add(best)
        return best

    def by_integers(self, cuts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Add cuts while the integer program gains; returns what was cut short."""
        unsolved = []
        for cut in self.search.places if self.integer else ():
            if cut not in cuts and not self.over():
                before, wider = self.search.best.overhead, self.wider(cuts, cut)
                if not self.solve(wider):
                    unsolved.append(wider)
                if self.search.best.overhead > before + GAIN:
                    cuts = wider
        return unsolved

    def by_density(self) -> list[tuple[int, ...]]:
        """Cut at every second op of the chain, then at every op, in small problems; returns what was cut short.

        Where many ops hold alike none of them gains anything alone, nor does a second one.
        """
        search, unsolved = self.search, []
        tail = [op for op, _ in search.chain[self.place[search.turn] :]]
        for cuts in (tuple(tail[::2]), tuple(tail)):
            if len(cuts) * len(search.graph.ops) <= DENSE and not self.over() and not self.solve(cuts):
                unsolved.append(cuts)
        return unsolved

    def wider(self, cuts: tuple[int, ...], cut: int) -> tuple[int, ...]:
        return tuple(sorted((*cuts, cut), key=lambda op: self.place[op]))

    def relaxed(self, cuts: tuple[int, ...]) -> float:
        """What the linear relaxation proves."""
        return self.search.solve(cuts, self.left, integer=False)[0]

    def solve(self, cuts: tuple[int, ...]) -> bool:
        """Solve the integer program, within a share of the time; whether it is solved."""
        limit = min(self.left, max(FIRST, self.spent))
        return self.integer and self.search.solve(cuts, limit, integer=True)[1]

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return max(0.0, self.time_limit - self.spent)

    def over(self) -> bool:
        """Whether to go on is of no use."""
        best = self.search.best
        return self.search.stopped or not self.left or best.unreachable or self.enough(best.overhead)


def lower_bound(graph: TrainingGraph, budget: int, time_limit: float = 10.0) -> Bound:
    """A proven floor of the overhead of any schedule of the problem whose peak is within ``budget`` bytes."""
    return BoundSearch(graph, budget).run(time_limit)


@dataclass(frozen=True, slots=True)
class PeakBound:
    """No schedule has a peak below ``bytes``. ``op`` bounds it: its working set does; None: inputs and
    outputs do."""

    bytes: int
    op: str | None


def min_peak_bound(graph: TrainingGraph) -> PeakBound:
    """The largest working set among the ops that every schedule must run, inputs included; or what the end
    holds."""
    inputs = set(graph.inputs)
    outputs = sum(graph.size[t] for t in graph.outputs if t not in inputs)
    needed = precedence(graph).needed
    sets = [(working_set(graph, i), op.name) for i, op in enumerate(graph.ops) if needed >> i & 1]
    largest, name = max(sets, key=lambda row: row[0], default=(0, ""))
    if largest < outputs or not sets:
        return PeakBound(graph.input_bytes + outputs, None)
    return PeakBound(graph.input_bytes + largest, name)


def _quantum(graph: TrainingGraph) -> float:
    """A number that every cost is a whole multiple of, or 0 where none is coarse enough to be of use."""
    thousandths = [round(op.cost * 1000) for op in (*graph.ops, *graph.inverses)]
    exact = all(
        abs(op.cost * 1000 - n) <= 1e-9 * max(1, n)
        for op, n in zip((*graph.ops, *graph.inverses), thousandths, strict=True)
    )
    quantum = math.gcd(*thousandths) / 1000
    return quantum if exact and quantum > 10 * COST_UNIT * graph.base_cost else 0.0
