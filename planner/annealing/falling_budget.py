"""Cheap plans at all peaks from no recomputation down to a budget, by one annealing whose budget falls in small steps.

At each step a plan differs little from the one before, so its cost stays low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.descents import Descent, DescentOptions
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.search_rules import ANY_ORDER, SearchRules
from rematplan.planner.core.strategy import INTERRUPTS, pareto

FALLING = DescentOptions(first_step=0.04, cleaning_moves=0, cleaning_heat=0.3, cleaning_share=0.8)
"""In 6 s, ResNet-50's plans of 1.2, 1.5 and 2 times the smallest peak have overheads of 47, 24 and 9 %. Three searches
for these budgets, of 15 s each, find 52, 20 and 9 %."""


def plans_down_to(
    graph: TrainingGraph,
    budget: int,
    effort: Effort,
    *,
    rules: SearchRules = ANY_ORDER,
    report: Callable[[Effort], None] = lambda _: None,
) -> tuple[Plan, ...]:
    """Return the Pareto front of plans found at peaks that fall from that without recomputation to ``budget`` bytes, or
    as far as the effort leads.

    Ctrl-C, or an `Enough` that ``report`` raises, ends the search and is recorded in ``effort.interrupted``.
    """
    annealer, base = Annealer(graph, *rules), [op.name for op in needed_ops(graph)]
    found: list[Plan] = []

    def offer(runs: Sequence[str]) -> Plan:
        found.append(plan_from_runs(graph, runs, "anneal"))
        return found[-1]

    descent = Descent(annealer, budget, len(base), graph.input_bytes, offer, report, FALLING)
    try:
        descent.run(offer(base), effort, effort.total)
    except INTERRUPTS as interrupt:
        effort.interrupt(interrupt)
    return pareto(found)
