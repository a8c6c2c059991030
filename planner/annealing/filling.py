"""Plans at evenly spaced budgets between known ones: one annealing serves them all.

It begins at the smallest known peak, and the budget rises step by step. Each sequence starts from the cheapest known
one that fits, so it always fits, and only loses recomputations that more memory makes needless.
"""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.cooling_schedule import WITH_PHASES
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, by_cost, by_peak, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import INTERRUPTS, Progress, silent

NAME = "anneal"


def plans_between(
    graph: TrainingGraph,
    known: Sequence[Plan],
    effort: Effort,
    progress: Progress = silent,
    *,
    count: int,
    seed: int = 0,
) -> list[Plan]:
    """Return plans at up to ``count`` evenly spaced budgets, from the smallest peak of the ``known`` plans to just
    below that of the cheapest. Each is cheaper than all known plans within its budget; budgets without such a plan are
    left out.

    Ctrl-C, or an `Enough` that ``progress`` raises, ends the search; the plans found so far are returned. `ValueError`
    without known plans.
    """
    annealer, found = Annealer(graph, seed), list[Plan]()
    low, high = min(known, key=by_peak).peak, min(known, key=by_cost).peak
    for k in range(count):
        budget = low + (high - low) * k // count
        start = min((plan for plan in (*known, *found) if plan.peak <= budget), key=by_cost)
        if not annealer.accepts(runs_of(start.schedule)):
            continue
        try:
            progress(k / count, "filling the curve")
            annealer.load(runs_of(start.schedule), budget)
            _cool(annealer, len(graph.ops), effort.part(effort.left / (count - k)))
        except INTERRUPTS:
            break
        plan = plan_from_runs(graph, annealer.tidied(annealer.best(), budget), NAME, budget=budget)
        found += [plan] if plan.estimate.cost < start.estimate.cost else []
    return found


def _cool(annealer: Annealer, ops: int, effort: Effort) -> None:
    """Anneal the loaded sequence from the temperature of a reheated round, for the whole effort."""
    warm, cold = WITH_PHASES.reheat * WITH_PHASES.hot(ops), WITH_PHASES.last_heat
    while not effort.over:
        heat = warm * (cold / warm) ** effort.share_spent
        annealer.cool_slice(effort, effort.next_slice(effort.left), heat, heat)
