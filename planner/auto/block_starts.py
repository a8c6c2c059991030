"""Plans by the block strategies, from which the annealing and the search for the smallest peak start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from rematplan.ir import LatticeTooLarge, TrainingGraph
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Enough, FamilyStrategy, pareto, silent
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.nested_dp import NestedDP
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import StoreAll, no_recompute

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


FRONT = 12
"""The largest number of plans from which all searches for one stage of a pipeline begin."""
LEANEST: FamilyStrategy = ApproxDP(objective="memory")
"""The strategy that makes start plans with a small peak, in addition to `NestedDP`, for problems of up to `VAST` ops.
"""


def starting_plans(
    graph: TrainingGraph, budget: int, effort: Effort, report: Callable[[str], None]
) -> tuple[Plan, ...]:
    """Return undominated plans to start from: of each block strategy, the cheapest within ``budget`` bytes and the one
    with the smallest peak. Once a plan is found, further strategies begin only while ``effort`` is left. Without
    phases, only `StoreAll` makes plans."""
    blocks = VAST_BLOCKS if len(graph.ops) > VAST else BLOCKS
    found: list[Plan] = []
    for row in (*ALWAYS, *(blocks if infer_phases(graph).has_phases else ())):
        if not found or not effort.over:
            found.extend(_first(graph, row, budget, effort, report))
    return pareto(found)


def block_front(graph: TrainingGraph, effort: Effort) -> tuple[Plan, ...]:
    """Return at most `FRONT` undominated plans for any budget, evenly chosen by rising peak: without recomputation, of
    `Reversible` with inverses, and of block strategies with phases. The first block strategy always runs; others begin
    only while ``effort`` is left."""
    found = [no_recompute(graph), *(Reversible().curve(graph, ()) if graph.inverses else ())]

    def progress(_fraction: float, _text: str) -> None:
        if effort.over:
            raise Enough

    blocks = VAST_BLOCKS if len(graph.ops) > VAST else BLOCKS
    for at, row in enumerate(blocks if infer_phases(graph).has_phases else ()):
        for member in row:
            with suppress(LatticeTooLarge):
                if not at or not effort.over:
                    found += member.family(graph, progress if at else silent)
                break
    front = sorted(pareto(found), key=lambda plan: plan.peak)
    picks = {round(at * (len(front) - 1) / (FRONT - 1)) for at in range(FRONT)}
    return tuple(front[at] for at in sorted(picks))


def nested_plans(
    graph: TrainingGraph, budget: int, effort: Effort, report: Callable[[str], None]
) -> tuple[Plan, ...]:
    """Return the plans of ``nested_dp`` near the budget: the cheapest that fits and the one with the smallest
    peak; none without phases.
    """
    if not infer_phases(graph).has_phases:
        return ()
    return _first(graph, (NestedDP(near=max(1, budget)),), budget, effort, report)


def leanest_plans(graph: TrainingGraph, effort: Effort) -> tuple[Plan, ...]:
    """Return plans with small peaks to start from: of block strategies if there are phases, and of `Reversible` if
    there are inverses. The first ``nested_dp`` and a fast strategy always run; others begin only while ``effort`` is
    left. With these plans, 20 s lead to 1.45 times DenseNet-161's largest working set instead of 2.11."""
    found = [*Reversible().curve(graph, ())[-1:]] if graph.inverses else []
    nested = nested_plans(graph, 0, effort, lambda _: None)
    vast = len(graph.ops) > VAST
    has_phases = infer_phases(graph).has_phases
    if has_phases:
        # Without it, a search on a busy machine could end at the peak without recomputation.
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
    """Return plans of the first strategy in ``row`` that does not refuse the problem as too large: the cheapest within
    ``budget`` bytes and the leanest. It is one plan if both are equal or none fits; none if all refuse. Once ``effort``
    is spent, the strategy makes no further candidates."""
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
