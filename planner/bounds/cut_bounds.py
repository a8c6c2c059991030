"""Proven lower bounds: of the overhead of any schedule within a budget, by sets of cuts, and of the peak of any
schedule.

They hold for any order of the ops, any number of runs of each op, and frees anywhere. The proofs are in
docs/lower-bound.md. Only the dual bound of the solver is used, less a margin for its arithmetic; the value of a
solution is never used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import precedence, working_sets
from rematplan.planner.bounds.cut_places import cut_candidates, heaviest_chain, needed_line
from rematplan.planner.bounds.loop_rows import pairs, violated
from rematplan.planner.bounds.max_flow import flow_bound
from rematplan.planner.bounds.multi_cut_program import COST_UNIT, CutProgram
from rematplan.planner.bounds.rounding import rounded_runs
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.ilp.solver import Solver

MARGIN = 0.01
"""Subtracted from the dual bound of a solver, in cost units, because its arithmetic is inexact: its tolerance on
reduced costs, 1e-7, times 10^5 variables."""

GAP = 0.05
"""The gap to which integer programs are solved, in cost units."""

ROUNDING = 1e-9
"""Subtracted from a bound by maximum flow, because its sums are floats."""

TINY = 1e-5
"""In problems of more than `LARGE` ops, tensors up to this share of the budget are assumed to be always resident."""
LARGE = 200
PLACES = 24
"""The number of ops along the network at which cuts are tried."""

VAST = 3000
"""With more ops no integer programs are solved: one program of this size may prove nothing for a minute."""
VAST_PLACES = 8

CLOSED = 1e-6
"""A plan counts as optimal if its overhead is at most this much above the lower bound: one ten-thousandth of a
percent of the cost of running each op once."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound. ``overhead``: no schedule within the budget has less; infinite if it is proven that no
    schedule fits."""

    overhead: float

    @property
    def unreachable(self) -> bool:
        """Whether it is proven that no schedule fits the budget that the bound is for."""
        return self.overhead == math.inf


class CutBounds:
    """Lower bounds of the overhead at one budget that sets of cuts prove, and the best of them so far (``best``).

    A *cut* at an op states that what is resident at the op's first run fits the budget. A lower bound for a budget
    also holds for smaller budgets; it is cached for them. `stop` may be called from another thread.

    ``rounded``: the sequence of runs of the last integer program's solution, empty if there is none. ``nearest``:
    the sequence of runs of the integer program that proved most so far. Both sequences may exceed the budget.
    """

    def __init__(self, graph: TrainingGraph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.order = precedence(graph)
        self.chain = heaviest_chain(graph, self.order)
        self.quantum = _quantum(graph)
        self.vast = len(graph.ops) > VAST
        self.places = cut_candidates(graph, self.chain, VAST_PLACES if self.vast else PLACES)
        self.loss_cut = self.places[0] if self.places else -1
        # With parallel branches the chain may miss the important ops (docs/lower-bound.md).
        aside = cut_candidates(graph, needed_line(graph, self.order), VAST_PLACES)
        self.waist = tuple(op for op, _ in self.chain if graph.ops[op].phase == "forward")[-1:]
        self.starts = tuple(dict.fromkeys((*self.places, *self.waist, *aside)))
        self._proven: dict[int, float] = cached_on(graph, "bounds", dict)
        known = [floor for larger, floor in self._proven.items() if larger >= budget]
        least = math.inf if budget < min_peak_bound(graph).bytes else self._floor()
        self.best = Bound(max([least, *known]))
        self.loops = dict.fromkeys(pairs(graph, self.order))
        self.rounded: Sequence[str] = ()
        self.nearest: Sequence[str] = ()
        self._stopped = False
        self._solver = Solver()

    def price(self, cut: int) -> float:
        """Return the lower bound of the overhead that a single cut proves by a maximum flow, and record it. ``cut``:
        the position in ``graph.ops`` of an op that every schedule runs.

        Infinite if no schedule fits; -1, which proves nothing, if there are inverses, if no op costs anything, or if
        the numbers are too large.
        """
        if not self.graph.base_cost or self.graph.inverses:
            return -1.0
        found = flow_bound(self.graph, self.order, cut, self.budget)
        self._raise(found - ROUNDING)
        return found

    def _raise(self, overhead: float) -> None:
        """Record a proven lower bound; infinite if no schedule fits."""
        floor = self._rounded_up(overhead) if math.isfinite(overhead) else overhead
        self.best = Bound(max(self.best.overhead, floor))
        self._proven[self.budget] = self.best.overhead

    def reached(self, overhead: float) -> bool:
        """Return whether ``overhead`` is at most the best bound so far plus `CLOSED`."""
        return overhead <= self.best.overhead + CLOSED

    def stop(self) -> None:
        """End the search at once. What the program being solved would have proven is lost."""
        self._stopped = True
        self._solver.stop()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called, which ends the search."""
        return self._stopped

    def _floor(self) -> float:
        """Return the overhead of running each needed op once."""
        needed = (op.cost for i, op in enumerate(self.graph.ops) if self.order.needed >> i & 1)
        return math.fsum(needed) / self.graph.base_cost - 1 if self.graph.base_cost else 0.0

    def solve(self, cuts: Sequence[int], seconds: float, *, integer: bool) -> tuple[float, bool]:
        """Solve the integer program of a set of cuts, or its linear relaxation, and record the bound that it proves.

        Loops of the solution (tensors that it computes only from each other) are excluded from later programs.

        Args:
            cuts: positions in ``graph.ops`` of ops, each of which must precede the next.
            seconds: the time limit of the solver.
            integer: whether to solve the integer program; if not, the relaxation.

        Returns:
            The overhead that is proven (infinite if no schedule fits), and whether more seconds would prove nothing
                more.
        """
        tiny = int(TINY * (self.budget - self.graph.input_bytes)) if len(self.graph.ops) > LARGE else 0
        program = CutProgram(self.graph, self.order, cuts, self.budget, tiny, self.loops)
        rows = program.rows
        if rows.impossible:
            self._raise(math.inf)
            return math.inf, True
        if not rows.cost:
            return self.best.overhead, True
        answer = self._solver.solve(rows, seconds, integer=integer, gap=GAP)
        if integer:
            self.rounded = ()
        proven = answer.dual
        if math.isfinite(proven):
            proven = (proven + rows.constant - MARGIN) * COST_UNIT - 1
        self._raise(proven)
        if not integer or answer.values is None:
            return proven, answer.done
        loops = violated(program, answer.values) if self.graph.inverses else ()
        self.loops.update(dict.fromkeys(loops))
        self.rounded = rounded_runs(program, answer.values)
        if answer.done and self.reached(proven):
            self.nearest = self.rounded
        return proven, answer.done and not loops

    def _rounded_up(self, overhead: float) -> float:
        """Return the least overhead, not below this one, that a sum of the ops' costs can have."""
        if not self.quantum:
            return overhead
        steps = math.ceil((overhead + 1) * self.graph.base_cost / self.quantum - 1e-3)
        return steps * self.quantum / self.graph.base_cost - 1


@dataclass(frozen=True, slots=True)
class PeakBound:
    """A lower bound of the peak of any schedule. ``bytes``: no schedule has a smaller peak. ``op``: the name of the
    op whose reads, writes and workspace are the reason; None if the inputs and outputs are."""

    bytes: int
    op: str | None


def min_peak_bound(graph: TrainingGraph) -> PeakBound:
    """Return a lower bound of the peak of any schedule: the inputs and the largest working set of an op that every
    schedule must run, or the inputs and outputs if that is more.

    An op's working set is its reads, writes and workspace.
    """
    inputs = set(graph.inputs)
    outputs = sum(graph.size[t] for t in graph.outputs if t not in inputs)
    needed = precedence(graph).needed
    own = zip(working_sets(graph), graph.ops, strict=True)
    sets = [(bytes_, op.name) for i, (bytes_, op) in enumerate(own) if needed >> i & 1]
    largest, name = max(sets, key=lambda row: row[0], default=(0, ""))
    if largest < outputs or not sets:
        return PeakBound(graph.input_bytes + outputs, None)
    return PeakBound(graph.input_bytes + largest, name)


def _quantum(graph: TrainingGraph) -> float:
    """Return a number of which every cost is a whole multiple, or 0 if there is none that is coarse enough to help."""
    thousandths = [round(op.cost * 1000) for op in (*graph.ops, *graph.inverses)]
    exact = all(
        abs(op.cost * 1000 - n) <= 1e-9 * max(1, n)
        for op, n in zip((*graph.ops, *graph.inverses), thousandths, strict=True)
    )
    quantum = math.gcd(*thousandths) / 1000
    return quantum if exact and quantum > 10 * COST_UNIT * graph.base_cost else 0.0
