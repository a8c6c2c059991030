"""The strategies whose plans others start from."""

from __future__ import annotations

import time
from collections.abc import Callable

from rematplan.ir import LatticeTooLarge, TrainingGraph
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
"""The members whose plans are starts, in rows: of each row the first counts that the problem is not too large
for."""

VAST = 3000
"""Ops beyond which the full searches of `BLOCKS` take longer than the annealing that they are to start."""
VAST_BLOCKS: Rows = (
    (ApproxDP(objective="time", max_lower_sets=300, budgets=6),),
    (ApproxDP(objective="memory", max_lower_sets=300, budgets=6),),
)
"""The members' stand-ins then: their work grows with the square of the lower sets, and chains of few blocks are
coarse anyway."""


LEANEST: FamilyStrategy = ApproxDP(objective="memory")
"""Where a search for less memory starts, beside nested plans."""


def starting_plans(
    graph: TrainingGraph, budget: int, until: float, report: Callable[[str], None]
) -> tuple[Plan, ...]:
    """Of each member the best plan for the budget and the leanest, as far as they come before a time of the monotonic
    clock; none that another dominates.

    ``report`` is told what is being done.
    """
    blocks = VAST_BLOCKS if len(graph.ops) > VAST else BLOCKS
    found: list[Plan] = []
    for row in (*ALWAYS, *(blocks if graph.has_phases else ())):
        if not found or time.monotonic() <= until:
            found.extend(_first(graph, row, budget, until, report))
    return pareto(found)


def nested_plans(
    graph: TrainingGraph, budget: int, until: float, report: Callable[[str], None]
) -> tuple[Plan, ...]:
    """As `starting_plans`, but only nested_dp's plans near this budget; used while nothing else fits."""
    return _first(graph, (NestedDP(near=max(1, budget)),), budget, until, report) if graph.has_phases else ()


def leanest_plans(graph: TrainingGraph, until: float) -> tuple[Plan, ...]:
    """Block plans of little memory, as far as they are found before a time of the monotonic clock: a search that
    begins with them ends lower than one that begins with the base order (DenseNet-161 in 20 s at 1.45 times the
    largest working set, not at 2.11; Swin-T at 1.17, not at 1.27)."""
    found = [*Reversible().curve(graph, ())[-1:]] if graph.inverses else []
    nested = nested_plans(graph, 0, until, lambda _: None)
    row = VAST_BLOCKS[-1] if len(graph.ops) > VAST else (LEANEST,)
    if graph.has_phases and (not (found or nested) or time.monotonic() <= until):
        found += _first(graph, row, 0, until, lambda _: None)
    if graph.has_phases and time.monotonic() <= until:  # tables of coarser units may round in its favour
        every = _first(graph, (NestedDP(),), 0, until, lambda _: None)
        nested = pareto((*nested, *every))[-1:]
    return (*found, *nested)


def _first(
    graph: TrainingGraph,
    row: tuple[FamilyStrategy, ...],
    budget: int,
    until: float,
    report: Callable[[str], None],
) -> tuple[Plan, ...]:
    """What the first member of a row that can take the problem has around the budget, as far as it comes."""
    for member in row:

        def progress(_fraction: float, text: str, name: str = member.name) -> None:
            if time.monotonic() > until:
                raise Enough
            report(f"{name}: {text}")

        try:
            return member.around(graph, budget, progress)
        except LatticeTooLarge:
            continue
    return ()
