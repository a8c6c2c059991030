"""Proven floors: of the overhead of any schedule within a budget, and of the peak of any schedule at all.

They hold for every order of the ops, any number of runs of each, and frees anywhere. docs/lower-bound.md has
the proofs. Only the solver's dual bound is used, never the value of a solution it found, less a margin for
its arithmetic.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds_cuts import choose_cuts, heaviest_chain, precedence, working_set
from rematplan.planner.bounds_flow import flow_bound
from rematplan.planner.bounds_model import COST_UNIT, CutProgram
from rematplan.planner.plan import Plan

CUTS = ((1, 0.05), (4, 0.05), (8, 0.3), (12, 0.6))
"""Number of cuts and the share of the backward half that they cover, from the quickest program to the
strongest."""

MARGIN = 0.01
"""Subtracted from a solver's dual bound, in cost units: its tolerance on reduced costs, 1e-7, times 10^5
variables."""

ROUNDING = 1e-9
"""Subtracted from a priced cut: its sums are of floats."""

TINY = 1e-5
"""Share of the budget up to which a tensor is taken to be resident always, in problems of more than `LARGE`
ops."""
LARGE = 200
TOO_LARGE = 60_000
"""Variables beyond which only the relaxation is solved."""

FIRST = 1.0
"""Seconds that any program may take; later ones may take as long as has been spent before."""

VAST = 3000
"""Ops beyond which relaxations come first: an integer program of this size may prove nothing for a minute, where
its relaxation alone is within tenths of a percent after seconds."""
VAST_FIRST = 20.0
"""As `FIRST`, for those."""
VAST_PROGRAM = 40_000
"""Ops times intervals beyond which a program, the quickest apart, is left out: its relaxation takes too long."""

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
    """The search for a bound at one budget; it can be asked, and told to stop, from another thread."""

    def __init__(self, graph: TrainingGraph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.order = precedence(graph)
        self.chain = heaviest_chain(graph, self.order)
        self.quantum = _quantum(graph)
        self.best = Bound(math.inf if budget < min_peak_bound(graph).bytes else self._floor())
        self._stopped = False
        self._vast = len(graph.ops) > VAST
        self.turn = self._cuts(1, 0.05)[0] if self.chain else -1
        self._relaxed: set[tuple[int, ...]] = set()

    def run(self, time_limit: float, enough: Callable[[float], bool] = lambda _: False) -> Bound:
        """Solve programs of rising strength for up to ``time_limit`` seconds; returns, and keeps, the best
        bound.

        ``enough``: asked after each program with the bound so far; True ends the search.
        """
        began = time.monotonic()
        self._price_cuts(lambda: self._stopped or enough(self.best.overhead))
        priced = self._vast and not self.graph.inverses  # the programs would take minutes to add a little
        pending = self._programs() if self.graph.base_cost and not priced else []
        first = VAST_FIRST if self._vast else FIRST
        longest = 0.0
        while pending:
            cuts = pending.pop(0)
            spent = time.monotonic() - began
            if self._stopped or spent + longest / 2 >= time_limit or self.best.unreachable:
                break
            if enough(self.best.overhead):
                break
            if not self._solve(cuts, time.monotonic() + min(time_limit - spent, max(first, spent))):
                pending.append(cuts)
            longest = max(longest, time.monotonic() - began - spent)
        return self.best

    def _price_cuts(self, enough: Callable[[], bool]) -> None:
        """The bounds of single cuts, each in milliseconds."""
        for cut in self._cuts(*CUTS[1] if self._vast else CUTS[-1]):
            if not enough() and not self.best.unreachable:
                self.price(cut)

    def price(self, cut: int) -> None:
        """Take in the bound of the cut at a needed op, quickly; with inverses there is none."""
        if not self.graph.base_cost or self.graph.inverses:
            return
        found = flow_bound(self.graph, self.order, cut, self.budget)
        if found == math.inf:
            self.best = Bound(math.inf)
        else:
            self._raise(found - ROUNDING)

    def _raise(self, overhead: float) -> None:
        """Take a proven floor in."""
        self.best = Bound(max(self.best.overhead, self._rounded_up(overhead)))

    def _programs(self) -> list[tuple[int, ...]]:
        """The sets of cuts to try, without those that make too large a program."""
        quickest, *others = dict.fromkeys(self._cuts(count, share) for count, share in CUTS)
        most = VAST_PROGRAM // len(self.order.recipes) if self._vast else len(self.chain) + 1
        return [quickest, *(cuts for cuts in others if len(cuts) + 1 <= most)]

    def _cuts(self, count: int, share: float) -> tuple[int, ...]:
        return tuple(choose_cuts(self.graph, self.chain, self.budget, count, share))

    def reached(self, overhead: float) -> bool:
        """Whether an overhead is as low as the bound, within what counts as closed."""
        return overhead <= self.best.overhead + CLOSED

    def closed(self, plan: Plan | None) -> bool:
        """Whether the plan is proven optimal; with none, whether it is proven that there is none."""
        return self.reached(math.inf if plan is None else plan.estimate.overhead)

    def stop(self) -> None:
        """End the search once the program being solved is done or given up: by then it has taken at most
        twice as long as now, or `FIRST` seconds (HiGHS cannot be interrupted; SCIP can, but writes errors to
        the terminal)."""
        self._stopped = True

    def _floor(self) -> float:
        """Every needed op runs once."""
        needed = (op.cost for i, op in enumerate(self.graph.ops) if self.order.needed >> i & 1)
        return math.fsum(needed) / self.graph.base_cost - 1 if self.graph.base_cost else 0.0

    def _solve(self, cuts: tuple[int, ...], until: float) -> bool:
        """Solve one program, or its relaxation, until a time of the monotonic clock; returns whether there is no
        more to learn from it."""
        tiny = int(TINY * (self.budget - self.graph.input_bytes)) if len(self.graph.ops) > LARGE else 0
        program = CutProgram(self.graph, self.order, cuts, self.budget, tiny)
        if program.rows.impossible:
            self.best = Bound(math.inf)
        if program.rows.impossible or not program.rows.cost:
            return True
        small = len(program.rows.cost) <= TOO_LARGE
        integer = small and (not self._vast or cuts in self._relaxed)
        self._relaxed.add(cuts)
        model = mathopt.Model.from_model_proto(program.rows.proto(integer))
        result = mathopt.solve(
            model,
            mathopt.SolverType.HIGHS,
            params=mathopt.SolveParameters(
                time_limit=datetime.timedelta(seconds=max(0.01, until - time.monotonic())),
                absolute_gap_tolerance=0.05 if integer else None,
                relative_gap_tolerance=0.0 if integer else None,
            ),
        )
        if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
            self.best = Bound(math.inf)
            return True
        dual = result.termination.objective_bounds.dual_bound
        if math.isfinite(dual):
            found = (dual + program.rows.constant - MARGIN) * COST_UNIT - 1
            self._raise(found)
        solved = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        return solved and (integer or not small)

    def _rounded_up(self, overhead: float) -> float:
        """The least overhead not below this one that sums of the ops' costs can have."""
        if not self.quantum:
            return overhead
        steps = math.ceil((overhead + 1) * self.graph.base_cost / self.quantum - 1e-3)
        return steps * self.quantum / self.graph.base_cost - 1


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
