"""Plans by the block strategies, from which the annealing and the search for the smallest peak start."""

from __future__ import annotations

from collections.abc import Callable

from rematplan.ir import LatticeTooLarge, TrainingGraph
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Enough, FamilyStrategy, pareto
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.nested_dp import NestedDP
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import StoreAll

Rows = tuple[tuple[FamilyStrategy, ...], ...]

ALWAYS: Rows = ((StoreAll(),),)
BLOCKS: Rows = (
    (ChenSqrt(),),
    (ChenGreedy(),),
    (NestedDP(),),
    (ExactDP(objective="time"), ApproxDP(objective="time")),
    (ExactDP(objective="memory"), ApproxDP(objective="memory")),
)
"""For problems with phases, the strategies that make start plans in addition to those in `ALWAYS`. Of each row, only
the first strategy is used that does not refuse the problem as too large."""

VAST = 3000
"""Problems with more ops than this use `VAST_BLOCKS`, because all strategies of `BLOCKS` would take longer than the
annealing."""
VAST_BLOCKS: Rows = (
    (ApproxDP(objective="time", max_lower_sets=300, budgets=6),),
    (ApproxDP(objective="memory", max_lower_sets=300, budgets=6),),
)
"""The strategies that replace `BLOCKS` for problems of more than `VAST` ops. Their time grows with the square of the
number of lower sets, so this number is limited."""


LEANEST: FamilyStrategy = ApproxDP(objective="memory")
"""The strategy that makes start plans with a small peak, in addition to `NestedDP`, for problems of up to `VAST` ops.
"""


def starting_plans(
    graph: TrainingGraph, budget: int, effort: Effort, report: Callable[[str], None]
) -> tuple[Plan, ...]:
    """Return plans from which a search can start. Each block strategy makes two: the cheapest plan that fits the
    budget, if there is one, and the plan with the smallest peak.

    Plans that another plan beats or equals in both peak and cost are left out.
    """
    blocks = VAST_BLOCKS if len(graph.ops) > VAST else BLOCKS
    found: list[Plan] = []
    for row in (*ALWAYS, *(blocks if infer_phases(graph).has_phases else ())):
        if not found or not effort.over:
            found.extend(_first(graph, row, budget, effort, report))
    return pareto(found)


def nested_plans(
    graph: TrainingGraph, budget: int, effort: Effort, report: Callable[[str], None]
) -> tuple[Plan, ...]:
    """Return two plans of the strategy ``nested_dp``, computed for peaks near the budget: the cheapest that fits, if
    there is one, and the one with the smallest peak.
    """
    if not infer_phases(graph).has_phases:
        return ()
    return _first(graph, (NestedDP(near=max(1, budget)),), budget, effort, report)


def leanest_plans(graph: TrainingGraph, effort: Effort) -> tuple[Plan, ...]:
    """Return plans with small peaks, as starts for a search for the smallest peak.

    They are made by block strategies if the problem has phases or phases can be inferred, and by the strategy
    `Reversible` if it has inverses. Otherwise there are none. Once ``effort`` is spent, no further
    strategy begins, and a running one is stopped. One fast strategy is used whatever the time: `ChenSqrt`, or one of
    `VAST_BLOCKS`. Without its plan, a search on a busy machine could end at the peak without recomputation.

    From these plans, a search ends at a smaller peak than from the plan without recomputation. In 20 s, it lowers the
    peak of DenseNet-161 to 1.45 times its largest working set, instead of 2.11 times; that of Swin-T to 1.17 times,
    instead of 1.27 times.
    """
    found = [*Reversible().curve(graph, ())[-1:]] if graph.inverses else []
    nested = nested_plans(graph, 0, effort, lambda _: None)
    vast = len(graph.ops) > VAST
    has_phases = infer_phases(graph).has_phases
    if has_phases:
        fast = VAST_BLOCKS[-1] if vast else (ChenSqrt(),)
        found += _first(graph, fast, 0, Effort(), lambda _: None)[-1:]
    if has_phases and not vast and not effort.over:
        found += _first(graph, (LEANEST,), 0, effort, lambda _: None)
    if has_phases and not effort.over:  # its coarser units sometimes give a lower peak
        every = _first(graph, (NestedDP(),), 0, effort, lambda _: None)
        nested = pareto((*nested, *every))[-1:]
    return (*found, *nested)


def _first(
    graph: TrainingGraph,
    row: tuple[FamilyStrategy, ...],
    budget: int,
    effort: Effort,
    report: Callable[[str], None],
) -> tuple[Plan, ...]:
    """Return two plans of one strategy: the cheapest that fits the budget, if there is one, and the one with the
    smallest peak.

    The strategy is the first one in ``row`` that does not refuse the problem as too large; if all do, there are no
    plans. It is stopped at its first report of progress once ``effort`` is spent. ``report``:
    called with a text that says what is being done.
    """
    for member in row:

        def progress(_fraction: float, text: str, name: str = member.name) -> None:
            if effort.over:
                raise Enough
            report(f"{name}: {text}")

        try:
            return member.around(graph, budget, progress)
        except LatticeTooLarge:
            continue
    return ()
