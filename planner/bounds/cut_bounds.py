"""Proven lower bounds of the overhead within a budget and of the peak, for any order, repeats and frees
(docs/lower-bound.md).

They come from *cuts*: ops at whose first execution the resident bytes must fit the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import precedence, working_sets
from rematplan.planner.bounds.cut_places import cut_candidates, heaviest_chain, needed_line
from rematplan.planner.bounds.loop_rows import pairs, violated
from rematplan.planner.bounds.max_flow import CutNetwork
from rematplan.planner.bounds.multi_cut_program import COST_UNIT, CutProgram
from rematplan.planner.bounds.runs_of_solution import rounded_runs
from rematplan.planner.bounds.tail_search import TailSearch, highest_proven
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.effort import Effort
from rematplan.planner.ilp.solver import Solver

MARGIN = 0.01
"""Subtracted from the dual bound of a solver, in cost units, because its arithmetic is inexact: its tolerance on
reduced costs, 1e-7, times 10^5 variables."""

GAP = 0.05
"""The gap to which integer programs are solved, in cost units."""

ROUNDING = 1e-9
"""Subtracted from a bound by maximum flow, or by a search back in time, because its sums are floats."""

TINY = 1e-5
"""In problems of more than `LARGE` ops, tensors up to this share of the budget are assumed to be always resident."""
LARGE = 200
PLACES = 24
"""The number of ops along the network's heaviest chain at which cuts are tried."""

VAST = 3000
"""In problems with more ops, no integer programs are solved: one program of this size may prove nothing for a minute.
"""
VAST_PLACES = 8
"""`PLACES` for such problems. In all problems, as many cuts are tried among the ops that every schedule must run."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound of the overhead of all schedules within a budget."""

    overhead: float
    """Infinite if it is proven that no schedule is within the budget."""

    @property
    def unreachable(self) -> bool:
        """Whether it is proven that no schedule is within the budget."""
        return self.overhead == math.inf


class CutBounds:
    """Proven lower bounds of the overhead at one budget, the best of them in ``best``. They are cached with
    the problem.
    """

    def __init__(self, graph: TrainingGraph, budget: int) -> None:
        """Choose the places for cuts. ``best`` begins with the best bound known for this or a larger budget, infinite
        if the budget is below `min_peak_bound`."""
        self.graph, self.budget = graph, budget
        self.order = precedence(graph)
        self.chain = heaviest_chain(graph, self.order)
        self.quantum = _quantum(graph)
        self.vast = len(graph.ops) > VAST
        self.places = cut_candidates(graph, self.chain, VAST_PLACES if self.vast else PLACES)
        self.loss_cut = self.places[0] if self.places else -1
        # With parallel branches the chain may miss the important ops (docs/lower-bound.md).
        aside = cut_candidates(graph, needed_line(graph, self.order), VAST_PLACES)
        # The last forward op of the chain.
        self.waist = tuple(op for op, _ in self.chain if graph.ops[op].phase == "forward")[-1:]
        self.starts = tuple(dict.fromkeys((*self.places, *self.waist, *aside)))
        self._proven: dict[int, float] = cached_on(graph, "bounds", dict)
        known = [floor for larger, floor in self._proven.items() if larger >= budget]
        least = math.inf if budget < min_peak_bound(graph).bytes else self._floor()
        # A bound for one budget holds for smaller ones.
        self.best = Bound(max([least, *known]))
        self.loops = dict.fromkeys(pairs(graph, self.order))
        # The runs of the last integer solution, and of the last one of a program that was solved to the end; empty
        # if there is none. Both may exceed the budget between cuts.
        self.rounded: Sequence[str] = ()
        self.nearest: Sequence[str] = ()
        self.stopped = False
        self._solver = Solver()

    def price(self, cut: int) -> float:
        """Record and return the bound that one cut proves by a maximum flow; infinite if no schedule fits.

        The bound is -1, which proves nothing, with inverses, without costs, or if sums would overflow.
        """
        if not self.graph.base_cost or self.graph.inverses:
            return -1.0
        found = CutNetwork(self.graph, self.order, cut).overhead(self.budget)
        self._raise(found - ROUNDING)
        return found

    def search_back(self, first: int, effort: Effort) -> None:
        """Record the overhead that a search back in time proves, over the cuts of ``chain`` that op ``first`` must
        precede; for problems without inverses."""
        cuts = [op for op, _ in self.chain if self.order.before[op] >> first & 1]
        if cuts:
            search = TailSearch(self.graph, self.order, cuts, first, self.budget)
            self._raise(highest_proven(search, self.best.overhead, effort) - ROUNDING)

    def _raise(self, overhead: float) -> None:
        """Record a proven overhead in ``best`` and the cache if it is higher; infinite if no schedule fits."""
        # First rounded up to an overhead that a sum of costs can have.
        floor = self._rounded_up(overhead) if math.isfinite(overhead) else overhead
        self.best = Bound(max(self.best.overhead, floor))
        self._proven[self.budget] = self.best.overhead

    def stop(self) -> None:
        """End the search at once. An integer program that is being solved is abandoned and proves nothing."""
        self.stopped = True
        self._solver.stop()

    def _floor(self) -> float:
        """Return the overhead of the ops that every schedule must run, each once: at most 0."""
        needed = (op.cost for i, op in enumerate(self.graph.ops) if self.order.needed >> i & 1)
        return math.fsum(needed) / self.graph.base_cost - 1 if self.graph.base_cost else 0.0

    def solve(self, cuts: Sequence[int], effort: Effort, *, integer: bool) -> tuple[float, bool]:
        """Solve the integer program of the cuts or, unless ``integer``, its linear relaxation, and record the overhead
        that it proves. Return this overhead (infinite if no schedule fits, -infinite if nothing is proven), and whether
        more time would prove no more. An ``integer`` search replaces ``rounded`` (empty without a solution), extends
        ``loops``, and sets ``nearest`` if it was solved to the end."""
        tiny = int(TINY * (self.budget - self.graph.input_bytes)) if len(self.graph.ops) > LARGE else 0
        program = CutProgram(self.graph, self.order, cuts, self.budget, tiny, self.loops)
        rows = program.rows
        if rows.impossible:
            self._raise(math.inf)
            return math.inf, True
        if not rows.cost:
            return self.best.overhead, True
        answer = self._solver.solve(rows, effort, integer=integer, gap=GAP)
        if integer:
            self.rounded = ()
        proven = answer.dual
        if math.isfinite(proven):
            proven = (proven + rows.constant - MARGIN) * COST_UNIT - 1
        self._raise(proven)
        if not integer or answer.values is None:
            return proven, answer.done
        # Tensors that the solution computes from each other alone; later programs exclude them.
        loops = violated(program, answer.values) if self.graph.inverses else ()
        self.loops.update(dict.fromkeys(loops))
        self.rounded = rounded_runs(program, answer.values)
        if answer.done:
            self.nearest = self.rounded
        return proven, answer.done and not loops

    def _rounded_up(self, overhead: float) -> float:
        """Round an overhead up to the next that a sum of costs can have, if `_quantum` found a common divisor."""
        if not self.quantum:
            return overhead
        steps = math.ceil((overhead + 1) * self.graph.base_cost / self.quantum - 1e-3)
        return steps * self.quantum / self.graph.base_cost - 1


@dataclass(frozen=True, slots=True)
class PeakBound:
    """A proven lower bound of the peak of all schedules of a problem."""

    bytes: int
    """No schedule has a smaller peak."""
    op: str | None
    """The op whose reads, writes and workspace need so many bytes with the inputs; None if the outputs do, or
    a search proved it.
    """
    searched: bool = False
    """Whether a search proved the bound."""


def min_peak_bound(graph: TrainingGraph) -> PeakBound:
    """Return a proven lower bound of the peak. It is the largest of three: inputs plus outputs, inputs plus the largest
    working set of an op that must run, and what `record_peak_bound` recorded."""
    inputs = set(graph.inputs)
    outputs = sum(graph.size[t] for t in graph.outputs if t not in inputs)
    needed = precedence(graph).needed
    own = zip(working_sets(graph), graph.ops, strict=True)
    recorded = _recorded_peak(graph).get("bytes", 0)
    sets = [(bytes_, op.name) for i, (bytes_, op) in enumerate(own) if needed >> i & 1]
    largest, name = max(sets, key=lambda row: row[0], default=(0, ""))
    if graph.input_bytes + max(largest, outputs) < recorded:
        return PeakBound(recorded, None, searched=True)
    if largest < outputs or not sets:
        return PeakBound(graph.input_bytes + outputs, None)
    return PeakBound(graph.input_bytes + largest, name)


def record_peak_bound(graph: TrainingGraph, bytes_: int) -> None:
    """Record a proven lower bound of the peak of all schedules of a problem, for `min_peak_bound`."""
    known = _recorded_peak(graph)
    known["bytes"] = max(bytes_, known.get("bytes", 0))


def _recorded_peak(graph: TrainingGraph) -> dict[str, int]:
    return cached_on(graph, "peak_bound", dict[str, int])


def _quantum(graph: TrainingGraph) -> float:
    """Return the greatest common divisor of all costs, to which bounds can be rounded up; 0 if there is none
    in thousandths or it is too small to help.
    """
    thousandths = [round(op.cost * 1000) for op in graph.recipes]
    rounded = zip(graph.recipes, thousandths, strict=True)
    exact = all(abs(op.cost * 1000 - n) <= 1e-9 * max(1, n) for op, n in rounded)
    quantum = math.gcd(*thousandths) / 1000
    return quantum if exact and quantum > 10 * COST_UNIT * graph.base_cost else 0.0
