"""Plans for the budgets ``least``, the smallest peak found, and ``min``, slightly more for a cheaper plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.annealing.falling_budget import plans_down_to
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.eviction import plan_by_eviction
from rematplan.planner.auto.rungs import rungs_above
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak, find_smallest_peak_in_stages
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.peak_ladder import ladder
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.search_rules import ANY_ORDER, SearchRules
from rematplan.planner.core.strategy import INTERRUPTS, Progress, Strategy, silent
from rematplan.planner.strategies.anneal import Anneal


@dataclass(frozen=True)
class MinBudgetOptions:
    """The constants of planning for the budgets ``min`` and ``least``, tuned by hand; no measurements were kept."""

    slack: float = 0.01
    """By how much a plan for the budget ``min`` may exceed the smallest peak found, as a share of that peak. At the
    smallest peak itself, saving the last bytes may cost more overhead than saving all others."""
    tries: int = 100
    """The largest number of simulations of eviction within the budget. The cheapest plan that they find is a start for
    the search that lowers the overhead."""
    eviction: float = 0.1
    """The share of the time for simulations of eviction, of the time left after the search for the smallest peak and
    for plans at larger peaks."""
    rungs: float = 0.4
    """The share of the time for plans at larger peaks, of the time left when the smallest peak has been found. The last
    search may start from them."""
    falling: float = 0.25
    """Of the time for plans at larger peaks: the share for one annealing whose budget falls from no recomputation on
    (`plans_down_to`). The rest is for annealing at single peaks (`rungs_above`)."""
    per_op: float = 0.05
    """The most seconds for each op that plans at larger peaks may take: small problems converge in a fraction."""


MIN_BUDGET = MinBudgetOptions()


def cheapest_near_smallest_peak(
    graph: TrainingGraph,
    time_limit: float = 30.0,
    progress: Progress = silent,
    *,
    slack: float = 0.0,
    moves: int = 0,
    rules: SearchRules = ANY_ORDER,
    starts: Sequence[Plan] = (),
    cheapest: Callable[[float], Strategy] | None = None,
) -> Plan:
    """Search for the smallest peak in at most half of the time. Return the cheapest plan found with a peak up to ``1 +
    slack`` times the smallest. If an interrupt ends the search before its last part, return the plan of the smallest
    peak. ``moves``: if not 0, they replace ``time_limit`` (seconds), and `Anneal` makes the last search. ``cheapest``:
    otherwise makes the strategy of the last search from the seconds left; None: `Auto`."""
    compile_kernels(progress)  # before the clock starts
    effort = Effort(moves=moves) if moves else Effort(time_limit)
    marked = infer_phases(graph)
    stated = graph if graph.has_phases else marked
    share = effort.like(SHARES.smallest_peak)
    search = find_smallest_peak if moves else find_smallest_peak_in_stages
    least = search(stated, share, starts, progress, rules=rules)
    effort.charge(moves=share.done)
    budget = least.estimate.peak + int(slack * least.estimate.peak)  # exact for a slack of 0, however large
    known = [*starts, least]
    interrupted = share.interrupted
    if slack and not interrupted:
        known += _plans_above(stated, marked, known, effort, rules=rules)
        interrupted = effort.interrupted
    if interrupted:
        return replace(least, budget=budget, near=ladder(known) if slack else ())
    try:
        if moves:
            strategy: Strategy = Anneal(**rules._asdict(), moves=max(1, int(effort.left)))
        else:
            part = effort.part(MIN_BUDGET.eviction * effort.left)
            tries = MIN_BUDGET.tries
            lean = plan_by_eviction(marked, budget, part, tries=tries, rules=rules)
            known += [lean] if lean else []
            left = effort.left
            strategy = cheapest(left) if cheapest else Auto(left, *rules)
        plan = strategy.plan(stated, budget, progress, known)
    except (InfeasibleBudget, *INTERRUPTS):
        plan = least
    # A strategy need not return the best plan that it starts from.
    fitting = [p for p in (plan, *((least,) if rules.keep_order else known)) if p.estimate.peak <= budget]
    best: Plan = min(fitting, key=lambda p: p.estimate.cost)
    near = ladder([*known, plan]) if slack else ()
    return replace(best, budget=budget if slack else best.peak, lower_bound=plan.lower_bound, near=near)


def _plans_above(
    stated: TrainingGraph,
    marked: TrainingGraph,
    known: Sequence[Plan],
    effort: Effort,
    *,
    rules: SearchRules,
) -> list[Plan]:
    """Return plans to start from: block plans with small peaks, unless ``rules`` keep the order, and plans at peaks
    above that of the last plan in ``known``. ``effort`` records an interrupt. ``stated``, ``marked``: the problem as
    stated, and with inferred phases."""
    found: list[Plan] = []
    if not rules.keep_order:  # block plans need not keep the order
        part = Effort() if effort.moves else effort.part(SHARES.blocks * effort.left)
        found += leanest_plans(stated, part)
    most = effort.of(MIN_BUDGET.per_op * len(marked.ops))
    above = effort.part(min(most, MIN_BUDGET.rungs * effort.left))
    falling = above.part(MIN_BUDGET.falling * above.left)
    found += plans_down_to(marked, known[-1].peak, falling, rules=rules)
    if not effort.interrupted:
        found += rungs_above(marked, [*known, *found], above, rules=rules)
    return found
