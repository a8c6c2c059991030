"""Auto: the best plan that rematplan knows to find, with a proven bound of what any plan could be."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from rematplan.ir import InfeasibleBudget, LatticeTooLarge, TrainingGraph
from rematplan.planner.bounds import CLOSED, Bound, BoundSearch, min_peak_bound
from rematplan.planner.cut_start import cut_start
from rematplan.planner.exhaustive import exhaustive
from rematplan.planner.memo import remember
from rematplan.planner.plan import Plan, plan_from_runs
from rematplan.planner.schedule import runs_of
from rematplan.planner.sequence import Annealer, compile_kernels
from rematplan.planner.sequence_problem import without_inverses
from rematplan.planner.sequence_search import Effort, Search
from rematplan.planner.strategies.anneal import annealed
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import StoreAll
from rematplan.planner.strategy import Progress, Strategy, pareto, silent

ALWAYS: tuple[tuple[Strategy, ...], ...] = ((StoreAll(),),)
BLOCKS: tuple[tuple[Strategy, ...], ...] = (
    (ChenSqrt(),),
    (ChenGreedy(),),
    (ExactDP(objective="time"), ApproxDP(objective="time")),
    (ExactDP(objective="memory"), ApproxDP(objective="memory")),
)
"""The members whose plans are starts, in rows: of each row the first counts that the problem is not too large
for."""

VAST = 3000
"""Ops beyond which the full searches of `BLOCKS` take longer than the annealing that they are to start."""
VAST_BLOCKS: tuple[tuple[Strategy, ...], ...] = (
    (ApproxDP(objective="time", max_lower_sets=300, budgets=6),),
    (ApproxDP(objective="memory", max_lower_sets=300, budgets=6),),
)
"""The members' stand-ins then: their work grows with the square of the lower sets, and chains of few blocks are
coarse anyway."""

PLAIN = 0.4  # share of the time for planning without the inverses, where there are any
LEAST = 0.4  # share of the time for the search, however long the members take
NEAR = 0.005
"""A loss-cut plan of a vast problem this near to the bound makes block plans unnecessary."""

STARTS = 0.3  # share of the progress bar that the members get
REFUSAL = 0.1  # share of the time for finding what peak could be had, where the budget's is proven impossible


@dataclass(frozen=True)
class Auto(Strategy):
    """Never worse than any of the members that it asks; a plan carries the name of the member that found it.

    It asks all of them up to 3000 ops; above, where they would take longer than the annealing, only a thinned
    `approx_dp`.

    The block strategies' plans (`exact_dp` finds all that `approx_dp` finds) start the annealing of the op
    sequence, while a second thread searches for a lower bound; the search ends when the gap is closed,
    nothing has improved for long, or the time is up. Problems of a few ops are solved exhaustively. Ctrl-C
    returns the best plan so far.

    Inverses are used where they help: a part of the time goes into a plan without them, which the rest improves.

    What was found for a problem is remembered as long as the problem lives: a plan for a smaller budget serves a
    larger one. Options as for `Anneal`; ``time_limit`` counts from the start of planning, members
    included, but however long they take, the search has its share.
    """

    time_limit: float = 30.0
    seed: int = 0
    keep_order: bool = False

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the best of all strategies, annealed further, with a proven bound"

    def plan(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> Plan:
        """See `Strategy.plan`."""
        if graph.inverses:
            return self._with_inverses(graph, budget, progress)
        compile_kernels()
        began = time.monotonic()
        bound = BoundSearch(graph, budget)
        known = self._known_or_starts(graph, bound, progress)
        left = max(LEAST * self.time_limit, self.time_limit - (time.monotonic() - began))

        def report(fraction: float, text: str) -> None:
            progress(STARTS + (1 - STARTS) * fraction, text)

        return replace(self, time_limit=left)._improve(bound, known, report)

    def _with_inverses(self, graph: TrainingGraph, budget: int, progress: Progress) -> Plan:
        """Plan without the inverses for a part of the time; what that finds starts the search with them."""
        plain, half = without_inverses(graph), replace(self, time_limit=PLAIN * self.time_limit)
        with suppress(InfeasibleBudget):  # with inverses it may well be reachable
            half.plan(plain, budget, lambda fraction, text: progress(PLAIN * fraction, text))
        known = self._known(graph)
        more = (*self._known(plain), *annealed(graph, self.keep_order), *Reversible().curve(graph, ()))
        known.extend(p for p in more if p not in known)
        rest = replace(self, time_limit=(1 - PLAIN) * self.time_limit)
        return rest._improve(
            BoundSearch(graph, budget),
            known,
            lambda fraction, text: progress(PLAIN + (1 - PLAIN) * fraction, text),
        )

    def curve(
        self, graph: TrainingGraph, budgets: Sequence[int], progress: Progress = silent
    ) -> tuple[Plan, ...]:
        """See `Strategy.curve`. From the largest budget down; the time limit holds for the whole curve."""
        steps = sorted(set(budgets), reverse=True)
        found: list[Plan] = []
        left = self.time_limit
        compile_kernels()  # before any clock starts
        for k, budget in enumerate(steps):
            # The k-th of n gets k shares: small budgets are the hard ones. What one leaves, the others get.
            share = replace(self, time_limit=left * (k + 1) / sum(range(k + 1, len(steps) + 1)))

            def report(fraction: float, text: str, k: int = k) -> None:
                progress((k + fraction) / len(steps), text)

            began = time.monotonic()
            try:
                found.append(share.plan(graph, budget, report))
            except InfeasibleBudget:
                break
            left = max(0.0, left - (time.monotonic() - began))
        return pareto([*found, *(p for p in self._known(graph) if p not in found)])

    def _known_or_starts(self, graph: TrainingGraph, bound: BoundSearch, progress: Progress) -> list[Plan]:
        """What was found for the problem before, by `Anneal` too, and the members' plans, asked for once."""
        known = self._known(graph)
        known.extend(p for p in annealed(graph, self.keep_order) if p not in known)
        cut = self._cut_plan(graph, bound)
        if cut is not None:
            known.append(cut)

        def members() -> int:
            starts = _starts(graph, lambda fraction, text: progress(STARTS * fraction, text))
            known.extend(p for p in starts if not self.keep_order or self._in_order(graph, p))
            return len(known)

        if len(graph.ops) <= VAST or cut is None or cut.estimate.overhead > bound.best.overhead + NEAR:
            remember(graph, ("auto, members", self.keep_order), members)
        return known

    def _cut_plan(self, graph: TrainingGraph, bound: BoundSearch) -> Plan | None:
        """The plan that the loss cut suggests for the budget."""
        if not graph.has_phases or not graph.base_cost or bound.turn < 0 or bound.best.unreachable:
            return None
        bound.price(bound.turn)
        runs = cut_start(graph, bound.order, bound.turn, bound.budget)
        if runs is None:
            return None
        plan = plan_from_runs(graph, runs, "loss_cut")
        return plan if not self.keep_order or self._in_order(graph, plan) else None

    def _known(self, graph: TrainingGraph) -> list[Plan]:
        return remember(graph, ("auto", self.keep_order), list)

    def _in_order(self, graph: TrainingGraph, plan: Plan) -> bool:
        return Annealer(graph, keep_order=True).accepts(runs_of(plan.schedule))

    def _improve(self, bound: BoundSearch, known: list[Plan], progress: Progress) -> Plan:
        graph, budget = bound.graph, bound.budget
        fitting = [p for p in known if p.estimate.peak <= budget]
        best = min(fitting, key=lambda p: (p.estimate.cost, p.estimate.peak), default=None)
        smallest = min(known, key=lambda p: p.estimate.peak, default=None)
        if not bound.closed(best):
            exact = None if graph.ordered or self.keep_order else exhaustive(graph, budget)
            if exact is not None:
                best, bound.best = self._exact(graph, exact.runs, exact.cost, best)
            else:
                found = self._search(
                    graph, budget, [p for p in (best, smallest) if p is not None], bound, progress
                )
                best = found.best if best is None or found.best is not None else best
                smallest = found.least
        if best is None:
            if smallest is None or bound.best.unreachable:  # refused without a search, so far
                smallest = self._least(graph, smallest, progress)
            known.append(smallest)
            raise InfeasibleBudget(self.name, budget, smallest.estimate.peak)
        known.append(best)
        return _with_bound(replace(best, budget=budget), bound.best)

    def _least(self, graph: TrainingGraph, smallest: Plan | None, progress: Progress) -> Plan:
        """The plan of the smallest peak that a short descent finds; looked for once."""

        def look() -> Plan:
            report = partial(_looking, progress)
            search = Search(graph, min_peak_bound(graph).bytes, self.seed, self.keep_order, report=report)
            search.prepare([runs_of(smallest.schedule)] if smallest else [])
            effort = Effort(REFUSAL * self.time_limit)
            search.descend(effort, effort.total)
            return search.least

        least = remember(graph, ("auto, least", self.keep_order), look)
        return min((p for p in (least, smallest) if p), key=lambda p: p.estimate.peak)

    def _exact(
        self, graph: TrainingGraph, runs: tuple[str, ...], cost: float, best: Plan | None
    ) -> tuple[Plan | None, Bound]:
        if cost == math.inf:
            return None, Bound(math.inf)
        plan = plan_from_runs(graph, runs, "exhaustive")
        if best is None or plan.estimate.cost < best.estimate.cost:
            best = plan
        return best, Bound(plan.estimate.overhead)

    def _search(
        self,
        graph: TrainingGraph,
        budget: int,
        starts: Sequence[Plan],
        bound: BoundSearch,
        progress: Progress,
    ) -> Search:
        """Anneal in this thread while another proves a bound; each stops when the other has closed the gap."""

        def report(fraction: float, overhead: float | None) -> None:
            progress(fraction, _text(overhead, bound.best.overhead))

        search = Search(graph, budget, self.seed, self.keep_order, bound.reached, report)
        effort = Effort(self.time_limit)
        with ThreadPoolExecutor(1) as pool:
            proof = pool.submit(bound.run, self.time_limit, lambda floor: search.overhead <= floor + CLOSED)
            try:
                search.run([runs_of(p.schedule) for p in starts], effort)
                if search.ended_early and not bound.closed(search.best):
                    wait([proof], max(0.0, self.time_limit - effort.spent()))
            except KeyboardInterrupt:
                if search.best is None:
                    raise
            finally:
                bound.stop()
            proof.result()
        return search


def _starts(graph: TrainingGraph, progress: Progress) -> Iterable[Plan]:
    """The trade-off of all members, none dominated."""
    blocks = VAST_BLOCKS if len(graph.ops) > VAST else BLOCKS
    rows = (*ALWAYS, *(blocks if graph.has_phases else ()))
    found: list[Plan] = []
    for i, row in enumerate(rows):
        for member in row:

            def report(fraction: float, text: str, i: int = i, name: str = member.name) -> None:
                progress((i + fraction) / len(rows), f"{name}: {text}")

            try:
                found.extend(member.curve(graph, (), report))
            except LatticeTooLarge:
                continue
            break
    return pareto(found)


def _with_bound(plan: Plan, bound: Bound) -> Plan:
    """The plan with its floor; optimal if the gap is closed."""
    overhead = plan.estimate.overhead
    if bound.overhead > overhead + CLOSED:  # a solver's error: no schedule can undercut a true bound
        return plan
    closed = overhead <= bound.overhead + CLOSED
    return replace(
        plan, lower_bound=min(bound.overhead, overhead), status="optimal" if closed else "feasible"
    )


def _looking(progress: Progress, fraction: float, _overhead: float | None) -> None:
    progress(fraction, "proven unreachable; looking for the smallest peak")


def _text(overhead: float | None, bound: float) -> str:
    floor = "proven unreachable" if bound == math.inf else f"bound {100 * bound:.2f} %"
    if overhead is None:
        return f"nothing fits yet, {floor}"
    return f"overhead {100 * overhead:.2f} %, {floor}, gap {100 * max(0.0, overhead - bound):.2f} points"
