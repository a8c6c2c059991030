"""Short searches for a plan from plans for other sizes of the same step: needless recomputations are removed,
then up to four anneals follow.

They start from the cheapest plan that fits, and from the one that exceeds the budget the least.
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
from rematplan.planner.core.search_rules import ANY_ORDER, SearchRules


@dataclass(frozen=True)
class PolishOptions:
    """The constants of `polished`, measured on GPT-12, BERT-6, Llama-8 and U-Net at 33 pairs of size and budget. Plans
    were within one point of a new search's overhead for 28 pairs after tidying, for 32 after four anneals of 0.1 s, for
    all after four of 0.4 s."""

    tidied: int = 12
    """The largest number of plans from which needless recomputations are removed. They are the cheapest that fit the
    budget."""
    heats: tuple[float, ...] = (0.01, 0.1)
    """The initial temperatures that are tried, in percent of the cost of running each op once. At each, up to two
    anneals begin."""
    last_heat: float = WITH_PHASES.last_heat
    """The final temperature of each anneal, in percent of the cost of running each op once."""
    seconds: float = 0.4
    """CPU seconds of each anneal."""
    slices: int = 8
    """If moves are counted: the number of equal parts of an anneal, each at a lower temperature than the one before."""
    slice_seconds: float = 0.02
    """If seconds are counted: the CPU seconds of an anneal between two readings of the clock."""


POLISH = PolishOptions()


def polished(
    graph: TrainingGraph,
    budget: int,
    starts: Sequence[Plan],
    *,
    seconds: float = POLISH.seconds,
    moves: int = 0,
    rules: SearchRules = ANY_ORDER,
) -> Iterator[Plan]:
    """Yield plans within ``budget`` bytes, each cheaper than the one before and than all fitting ``starts`` (plans
    found for other sizes, simulated for ``graph``). Starts that `Annealer.accepts` refuses are ignored. Each anneal
    makes ``moves`` moves, or takes ``seconds`` CPU seconds if ``moves`` is 0; if both are 0, only needless
    recomputations are removed."""
    compile_annealer()
    annealer = Annealer(graph, *rules)
    usable = [p for p in starts if annealer.accepts(runs_of(p.schedule))]
    fitting = sorted((p for p in usable if p.estimate.peak <= budget), key=by_cost)
    best = fitting[0] if fitting else None

    def better(runs: Sequence[str]) -> Plan | None:
        plan = plan_from_runs(graph, runs, "anneal", budget=budget)
        fits = plan.estimate.peak <= budget
        return plan if fits and (best is None or plan.estimate.cost < best.estimate.cost) else None

    tidied = [annealer.tidied(runs_of(p.schedule), budget) for p in fitting[: POLISH.tidied]]
    if found := min(filter(None, map(better, tidied)), key=by_cost, default=None):
        best = found
        yield best
    over = min((p for p in usable if p.estimate.peak > budget), key=lambda p: p.estimate.peak, default=None)
    for heat in POLISH.heats if seconds or moves else ():
        for start in (best, over):
            if start is None:
                continue
            annealer.load(runs_of(start.schedule), budget)
            _cool(annealer, heat, seconds, moves)
            if annealer.feasible and (found := better(annealer.tidied(annealer.best(), budget))):
                best = found
                yield best


def _cool(annealer: Annealer, hot: float, seconds: float, moves: int) -> None:
    """Anneal the loaded sequence from the temperature ``hot`` to `PolishOptions.last_heat`, with ``moves`` moves, or
    for ``seconds`` CPU seconds if ``moves`` is 0."""
    cold, slices = POLISH.last_heat, POLISH.slices
    done, count = 0.0, max(1, moves // slices) if moves else 1000
    began = time.thread_time()
    while done < 1.0:
        clock = time.thread_time()
        annealer.cool(count, hot * (cold / hot) ** done, hot * (cold / hot) ** min(1.0, done + 1 / slices))
        if moves:
            done += 1 / slices
            continue
        now = time.thread_time()
        count = max(200, min(2 * count, int(count * POLISH.slice_seconds / max(now - clock, 1e-6))))
        done = (now - began) / seconds
