"""Change a plan so that recomputation runs on a second thread or CUDA stream, if possible, and for ``auto`` if it
saves time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rematplan.ir import TrainingGraph
from rematplan.ir.errors import show_bytes
from rematplan.ir.training_graph import LIBRARIES, THREADS
from rematplan.planner.core.lane_schedule import Sharing, place
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.overlap.place_on_lanes import PAYS, USUAL, fastest_on_two_lanes, saved
from rematplan.planner.strategies.reversible import Reversible

if TYPE_CHECKING:
    from rematplan.runtime.graph.captured_step import CapturedStep

OFF, AUTO, ON = "off", "auto", "on"


def stated_sharing(strategy: Strategy) -> Sharing:
    """Return how fast each of two lanes is while both work: as the strategy states, otherwise a typical value."""
    return replace(USUAL, speed=strategy.lane_speed) if strategy.lane_speed else USUAL


def overlapped(
    graph: TrainingGraph, plan: Plan, mode: str | None, sharing: Callable[[], Sharing]
) -> tuple[Plan, tuple[str, ...]]:
    """Return the fastest of ``plan`` and plans with inverses on two lanes, if ``mode`` asks for them, with
    `AUTO` only if they save enough time (`PAYS`). If not, return ``plan``, and a note why if ``mode`` asked.
    ``sharing``: returns how fast two lanes are."""
    if mode in (None, OFF):
        return (replace(plan, lanes=None) if mode else plan), ()
    budget = plan.estimate.peak if plan.budget is None else plan.budget
    thread = graph.fixed_split.get(LIBRARIES, 0) // THREADS  # the recovery lane is a further thread
    shared = sharing()
    inverted = Reversible().curve(graph, ()) if graph.inverses else ()
    found = fastest_on_two_lanes(graph, (plan, *inverted), budget - thread, shared)
    if found is None:
        why = "the plan recomputes nothing in the backward"
        if thread:
            why += f", or the budget has no room for the {show_bytes(thread)} that libraries keep for a second thread"
        return plan, (f"two_lanes: {why}; the plan has one lane",)
    share = saved(found, plan.estimate.cost)
    if mode == AUTO and share < PAYS:
        said = (
            f"two lanes would save {share:.1%} of the step's time"
            if round(share, 3) > 0  # shown as 0.0 % otherwise
            else "two lanes would save no time"
        )
        return plan, (f"two_lanes: {said} (each at {shared.speed:.2f} of its speed); the plan has one lane",)
    if found.schedule != plan.schedule:  # the lower bound holds for any plan
        found = replace(found, lower_bound=plan.lower_bound, status="feasible")
    return replace(found, budget=plan.budget, fingerprint=plan.fingerprint), ()


def sharing_on(
    step: CapturedStep, graph: TrainingGraph, plan: Plan, strategy: Strategy, *, measured: bool
) -> Sharing:
    """Return how fast each of two lanes is while both work: as the strategy states, else, if ``measured``, on ops of
    ``plan`` on this device, else a typical value."""
    if strategy.lane_speed or not measured:
        return stated_sharing(strategy)
    from rematplan.runtime.execute.lane_speed import measured_sharing  # torch takes seconds to import

    runs = runs_of(plan.schedule)
    return measured_sharing(step, runs, place(graph, runs), {name: graph.op[name].cost for name in runs})
