"""Short searches from plans of other sizes: each is tidied, then annealed at low temperatures.

A plan that was found for one size of a step is nearly as good at another: what it recomputes without need is removed,
and a few anneals of a fraction of a second adapt the rest. Two of them start from the best plan that fits, two from
the one over the budget by the fewest bytes, which is cheaper.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import Annealer, compile_annealer
from rematplan.planner.annealing.cooling_schedule import WITH_PHASES
from rematplan.planner.core.plan import Plan, by_cost, plan_from_runs
from rematplan.planner.core.schedule import runs_of


@dataclass(frozen=True)
class AdaptOptions:
    """The constants of `polished`: removal of needless runs (tidying) and short anneals, from plans that were found
    for other sizes.

    Measured for GPT-12, BERT-6, Llama-8 and U-Net at 33 pairs of length and budget, with plans for other lengths:
    after tidying, 28 plans were within one point of overhead of a fresh search's (the worst 5.1 above it); after
    four anneals of 0.1 s, 32; after four of 0.4 s, all (the worst 0.35 above it).
    """

    tidied: int = 12
    """The largest number of plans that are tidied: the cheapest that fit the budget."""
    heats: tuple[float, ...] = (0.01, 0.1)
    """The first temperature of each anneal, in percent of the cost of running each op once."""
    last_heat: float = WITH_PHASES.last_heat
    """The last temperature of each anneal, in percent of the cost of running each op once."""
    seconds: float = 0.4
    """CPU seconds of each anneal."""
    slices: int = 8
    """The number of slices of an anneal, each at a lower temperature, if moves are counted."""
    slice_seconds: float = 0.02
    """CPU seconds of a slice, if seconds are counted."""


ADAPT = AdaptOptions()


def polished(
    graph: TrainingGraph,
    budget: int,
    starts: Sequence[Plan],
    *,
    seconds: float = ADAPT.seconds,
    moves: int = 0,
    seed: int = 0,
    keep_order: bool = False,
) -> Iterator[Plan]:
    """Yield better and better plans within ``budget`` bytes, from plans that were found for other sizes.

    Runs that the budget does not need are removed from the starts, then a few short anneals follow. Each plan is
    cheaper than all before it and than all starts that fit; none is yielded if nothing cheaper is found.

    Args:
        graph: the problem.
        budget: bytes.
        starts: plans of the problem, within the budget or over it. Those that the annealer cannot start from are
            ignored.
        seconds: CPU time of each anneal; with 0 and no ``moves``, there are no anneals.
        moves: if not 0, the moves of each anneal, instead of a time, so that the plans are the same on every
            machine.
        seed: the seed of the random moves.
        keep_order: whether the first runs of all ops keep the problem's order.
    """
    compile_annealer()
    annealer = Annealer(graph, seed, keep_order)
    usable = [p for p in starts if annealer.accepts(runs_of(p.schedule))]
    fitting = sorted((p for p in usable if p.estimate.peak <= budget), key=by_cost)
    best = fitting[0] if fitting else None

    def better(runs: Sequence[str]) -> Plan | None:
        plan = plan_from_runs(graph, runs, "anneal", budget=budget)
        fits = plan.estimate.peak <= budget
        return plan if fits and (best is None or plan.estimate.cost < best.estimate.cost) else None

    tidied = [annealer.tidied(runs_of(p.schedule), budget) for p in fitting[: ADAPT.tidied]]
    if found := min(filter(None, map(better, tidied)), key=by_cost, default=None):
        best = found
        yield best
    over = min((p for p in usable if p.estimate.peak > budget), key=lambda p: p.estimate.peak, default=None)
    for heat in ADAPT.heats if seconds or moves else ():
        for start in (best, over):
            if start is None:
                continue
            annealer.load(runs_of(start.schedule), budget)
            _cool(annealer, heat, seconds, moves)
            if annealer.feasible and (found := better(annealer.tidied(annealer.best(), budget))):
                best = found
                yield best


def _cool(annealer: Annealer, hot: float, seconds: float, moves: int) -> None:
    """Cool the loaded sequence from a temperature to the last one, for a number of moves or for CPU seconds."""
    cold, slices = ADAPT.last_heat, ADAPT.slices
    done, count = 0.0, max(1, moves // slices) if moves else 1000
    began = time.thread_time()
    while done < 1.0:
        clock = time.thread_time()
        annealer.cool(count, hot * (cold / hot) ** done, hot * (cold / hot) ** min(1.0, done + 1 / slices))
        if moves:
            done += 1 / slices
            continue
        now = time.thread_time()
        count = max(200, min(2 * count, int(count * ADAPT.slice_seconds / max(now - clock, 1e-6))))
        done = (now - began) / seconds
