"""Short searches from plans of other sizes: each is tidied, then annealed at low temperatures.

A plan that was found for one size of a step is nearly as good at another: what it recomputes without need is removed,
and a few anneals of a fraction of a second adapt the rest. Two of them start from the best plan that fits, two from
the one over the budget by the fewest bytes, which is cheaper.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import Annealer, compile_annealer
from rematplan.planner.annealing.restarts import COLD
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of

TIDIED = 12
"""The number of plans that are tidied: the cheapest that fit."""
HEATS = (0.01, 0.1)
"""First temperatures of the anneals, in percent of the base cost."""
SECONDS = 0.4
"""CPU seconds of each anneal."""
SLICES = 8
"""The number of slices of an anneal, each at a lower temperature, if moves are counted."""
SLICE = 0.02
"""CPU seconds of a slice, if seconds are counted."""


def polished(
    graph: TrainingGraph,
    budget: int,
    starts: Sequence[Plan],
    *,
    seconds: float = SECONDS,
    moves: int = 0,
    seed: int = 0,
    keep_order: bool = False,
) -> Iterator[Plan]:
    """Yield better and better plans within a budget (bytes), each cheaper than all before it and all starts that fit.

    Args:
        graph: the problem.
        budget: bytes.
        starts: plans of the problem, within the budget or over it. Those that cannot be a start are ignored.
        seconds: CPU time of each of the anneals; with 0 and no ``moves``, the starts are only tidied.
        moves: if not 0, the moves of each anneal, instead of a time, so that the plans are the same on every machine.
        seed: the seed of the random moves.
        keep_order: whether the first runs of all ops keep the base order.
    """
    compile_annealer()
    annealer = Annealer(graph, seed, keep_order)
    usable = [p for p in starts if annealer.accepts(runs_of(p.schedule))]
    fitting = sorted((p for p in usable if p.estimate.peak <= budget), key=_cost)
    best = fitting[0] if fitting else None

    def better(runs: Sequence[str]) -> Plan | None:
        plan = plan_from_runs(graph, runs, "anneal", budget=budget)
        fits = plan.estimate.peak <= budget
        return plan if fits and (best is None or plan.estimate.cost < best.estimate.cost) else None

    tidied = [annealer.tidied(runs_of(p.schedule), budget) for p in fitting[:TIDIED]]
    if found := min(filter(None, map(better, tidied)), key=_cost, default=None):
        best = found
        yield best
    over = min((p for p in usable if p.estimate.peak > budget), key=lambda p: p.estimate.peak, default=None)
    for heat in HEATS if seconds or moves else ():
        for start in (best, over):
            if start is None:
                continue
            annealer.load(runs_of(start.schedule), budget)
            _cool(annealer, heat, seconds, moves)
            if annealer.feasible and (found := better(annealer.tidied(annealer.best(), budget))):
                best = found
                yield best


def _cool(annealer: Annealer, heat: float, seconds: float, moves: int) -> None:
    """Cool the loaded sequence from a temperature to `COLD`, for a number of moves or for CPU seconds."""
    done, count = 0.0, max(1, moves // SLICES) if moves else 1000
    began = time.thread_time()
    while done < 1.0:
        clock = time.thread_time()
        annealer.cool(
            count, heat * (COLD / heat) ** done, heat * (COLD / heat) ** min(1.0, done + 1 / SLICES)
        )
        if moves:
            done += 1 / SLICES
            continue
        now = time.thread_time()
        count = max(200, min(2 * count, int(count * SLICE / max(now - clock, 1e-6))))
        done = (now - began) / seconds


def _cost(plan: Plan) -> tuple[float, int]:
    return plan.estimate.cost, plan.estimate.peak
