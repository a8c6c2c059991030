"""Run planned steps: peaks, times, and the comparison with plain autograd."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rematplan.ir import UsageError
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent
from rematplan.runtime.capture.fake_weights import is_weightless
from rematplan.runtime.costs.measure import (
    peak_above_entry,
    release_libraries,
    rounds_in_turn,
    seconds_in_turn,
)
from rematplan.runtime.execute.planned_step import PlannedStep, Verification, eager_step, untouched, verify
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.problem.planning_problem import training_graph
from rematplan.step_loading import LoadedStep


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements of a planned step.

    ``measured_peak``, ``eager_peak``: the measured peaks in bytes, parameters, buffers and batch included, with the
    plan and with plain autograd. ``seconds``, ``eager_seconds``: the time of one step with each. ``losses``: the loss
    of each timed step. ``verification``: the comparison with plain autograd; None if it was not asked for.
    ``one_lane_seconds``: the time of the same plan on one lane, if the plan has two; otherwise None.
    """

    plan: Plan
    measured_peak: int
    eager_peak: int
    seconds: float
    eager_seconds: float
    losses: tuple[float, ...]
    verification: Verification | None
    one_lane_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was timed alternately with others.

    ``plan``: None stands for plain autograd. ``peak``: the measured peak in bytes, parameters, buffers and batch
    included. ``seconds``: the time of the step in each round.
    """

    plan: Plan | None
    peak: int
    seconds: tuple[float, ...]

    def overheads(self, base: MeasuredPlan) -> tuple[float, float, float]:
        """Return the minimum, median and maximum over the rounds of the extra time, as a share of ``base``'s time."""
        ratios = sorted(own / other - 1 for own, other in zip(self.seconds, base.seconds, strict=True))
        return ratios[0], statistics.median(ratios), ratios[-1]


def run_step(
    loaded: LoadedStep, plan: Plan, *, steps: int = 3, check: bool = False, progress: Progress = silent
) -> StepReport:
    """Run a planned step; measure its peak, and its time alternately with plain autograd's.

    No optimizer runs, and the module's state is restored afterwards.

    Args:
        loaded: the step.
        plan: a plan of the step's problem.
        steps: the number of timed steps, whose losses are reported.
        check: also compare loss, gradients and buffers with plain autograd.
        progress: called with the fraction done and a short text.

    Raises:
        UsageError: the step was loaded without weights.
    """
    if is_weightless(loaded.batch):
        raise UsageError(f"{loaded.step.name} was loaded without weights: it can be planned, but not run")
    planned = PlannedStep(loaded.module, loaded.step, plan.schedule, plan.lanes)
    module, batch, device = loaded.module, loaded.batch, loaded.step.device
    losses: list[float] = []

    def run_planned() -> None:
        module.zero_grad(set_to_none=True)
        losses.append(float(planned(*batch)))

    def run_eager() -> None:
        module.zero_grad(set_to_none=True)
        eager_step(module, batch)

    verification = None
    if check:
        progress(0.0, "comparing with plain autograd")
        verification = verify(planned, batch, predicted=predicted_error(loaded, plan))
    resident = _held_bytes(loaded)
    with untouched(module):
        progress(0.3, "measuring peaks")
        peaks = []
        for run in (run_planned, run_eager):
            module.zero_grad(set_to_none=True)
            release_libraries(device)
            peaks.append(resident + peak_above_entry(run, device)[0])
        progress(0.6, "timing")
        losses.clear()
        timed: dict[str, Callable[[], None]] = {"planned": run_planned, "eager": run_eager}
        if plan.lanes:
            timed["one lane"] = _one_lane(loaded, plan)
        seconds = seconds_in_turn(timed, device, steps)
    progress(1.0, "done")
    return StepReport(
        plan,
        peaks[0],
        peaks[1],
        seconds["planned"],
        seconds["eager"],
        tuple(losses[1:]),
        verification,
        seconds.get("one lane"),
    )


def measure_plans(
    loaded: LoadedStep, plans: Sequence[Plan], *, rounds: int = 5, progress: Progress = silent
) -> tuple[MeasuredPlan, ...]:
    """Measure the peaks of plans and of plain autograd, then time all of them alternately in ``rounds`` rounds.

    Plans with two lanes run on one lane. Times may be compared within a round, since a slow spell of the machine
    affects all plans of a round alike. The module's state is restored afterwards.

    Returns:
        One `MeasuredPlan` for each plan, in order, and one for plain autograd at the end.

    Raises:
        UsageError: the step was loaded without weights.
    """
    if is_weightless(loaded.batch):
        raise UsageError(f"{loaded.step.name} was loaded without weights: it can be planned, but not run")
    module, batch, device = loaded.module, loaded.batch, loaded.step.device

    def run_eager() -> None:
        module.zero_grad(set_to_none=True)
        eager_step(module, batch)

    calls = {str(k): _one_lane(loaded, plan) for k, plan in enumerate(plans)} | {"eager": run_eager}
    resident, peaks = _held_bytes(loaded), []
    with untouched(module):
        for done, call in enumerate(calls.values()):
            progress(0.5 * done / len(calls), "measuring peaks")
            module.zero_grad(set_to_none=True)
            release_libraries(device)
            peaks.append(resident + peak_above_entry(call, device)[0])
        progress(0.5, "timing")
        seconds = rounds_in_turn(calls, device, rounds).values()
    rows = zip((*plans, None), peaks, seconds, strict=True)
    return tuple(MeasuredPlan(*row) for row in rows)


def _one_lane(loaded: LoadedStep, plan: Plan) -> Callable[[], None]:
    step = PlannedStep(loaded.module, loaded.step, plan.schedule)

    def run() -> None:
        loaded.module.zero_grad(set_to_none=True)
        step(*loaded.batch)

    return run


def predicted_error(loaded: LoadedStep, plan: Plan) -> float:
    """Return the largest predicted relative error of the forward tensors that the backward reads.

    Only tensors that the plan recovers by inverses have an error. The result is 0 if the step has no inverse that
    rounds. Otherwise it is at least one rounding error, even if the plan runs no inverse, because the step may sum in
    another order.
    """
    if not loaded.inexact:
        return 0.0
    free = {call.name: CallCost(0.0) for call in loaded.step.priced_calls}
    rounding = max(torch.finfo(p.dtype).eps for p in loaded.module.parameters() if p.is_floating_point()) / 2
    return max(rounding, worst_error(training_graph(loaded.step, free), plan.schedule))


def _held_bytes(loaded: LoadedStep) -> int:
    """Return the bytes that are resident before the step: parameters, buffers, batch and constants."""
    module = loaded.module
    tensors = [*module.parameters(), *module.buffers(), *loaded.batch, *loaded.step.constants.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
