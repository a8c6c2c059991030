"""A plan on two lanes, if that is wanted and pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rematplan.ir import TrainingGraph, UsageError
from rematplan.ir.errors import show_bytes
from rematplan.ir.training_graph import LIBRARIES, THREADS
from rematplan.planner.core.lanes import Sharing, place
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.overlap.two_lanes import PAYS, fastest_on_two_lanes, saved
from rematplan.planner.strategies.reversible import Reversible

if TYPE_CHECKING:
    from rematplan.runtime.graph.captured_step import CapturedStep

OFF, AUTO, ON = "off", "auto", "on"
MODES = (OFF, AUTO, ON)


def check_mode(mode: str | None) -> None:
    """Refuse what is no mode.

    Raises:
        UsageError: the message lists the modes.
    """
    if mode not in (None, *MODES):
        raise UsageError(f"unknown overlap {mode!r}; known: {', '.join(MODES)}")


def overlapped(
    graph: TrainingGraph,
    plan: Plan,
    mode: str | None,
    sharing: Callable[[], Sharing],
    more: Iterable[Plan] = (),
) -> tuple[Plan, tuple[str, ...]]:
    """The plan, or one of its problem that is sooner done on two lanes within the same budget; and why it has one lane
    if it was not to have one.

    ``mode``: ``on``; ``auto``: where that is predicted to save `PAYS` of the time; ``off``; None: the plan as it is.
    ``sharing``: how the lanes share the device, asked for when needed. ``more``: further plans of the same problem.
    """
    if mode in (None, OFF):
        return (replace(plan, lanes=None) if mode else plan), ()
    budget = plan.estimate.peak if plan.budget is None else plan.budget
    thread = graph.fixed_split.get(LIBRARIES, 0) // THREADS  # the recovery lane's is a further one
    shared = sharing()
    inverted = Reversible().curve(graph, ()) if graph.inverses else ()
    found = fastest_on_two_lanes(graph, (plan, *more, *inverted), budget - thread, shared)
    if found is None:
        why = "nothing comes back in the backward half"
        if thread:
            why += (
                f", or the {show_bytes(thread)} that libraries keep for a further thread are over the budget"
            )
        return plan, (f"overlap: {why}, so that the plan has one lane",)
    share = saved(found, plan.estimate.cost)
    if mode == AUTO and share < PAYS:
        said = (
            f"two lanes would save {share:.1%} of the step's time"
            if round(share, 3) > 0  # what rounding leaves is no time
            else "two lanes would save no time"
        )
        return plan, (f"overlap: {said}, each at {shared.speed:.2f} of its speed, so that the plan has one",)
    if found.schedule != plan.schedule:  # the floor is any plan's
        found = replace(found, lower_bound=plan.lower_bound, status="feasible")
    return replace(found, budget=plan.budget, fingerprint=plan.fingerprint), ()


def sharing_here(step: CapturedStep, graph: TrainingGraph, plan: Plan) -> Sharing:
    """How the lanes of a plan share the present device, measured on the step's ops."""
    from rematplan.runtime.execute.lane_speed import measured_sharing  # torch takes seconds to import

    runs = runs_of(plan.schedule)
    return measured_sharing(step, runs, place(graph, runs), {name: graph.op[name].cost for name in runs})
