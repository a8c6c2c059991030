"""Run planned training steps, measure their peaks and times, and compare them with plain autograd."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.module.given_plan import module_with_plan, ops_of
from rematplan.module.plan_access import Planning
from rematplan.module.verification import Verification, run_once, untouched, verify
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent
from rematplan.plans.options import PlanOptions
from rematplan.plans.refining import StepPlan
from rematplan.runtime.capture.fake_weights import is_weightless
from rematplan.runtime.costs.device_models import ROOFLINE
from rematplan.runtime.costs.measure import (
    bytes_of,
    interleaved_rounds,
    interleaved_seconds,
    peak_above_entry,
    release_libraries,
)
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.problem.loss_boundary import with_loss_boundary
from rematplan.runtime.problem.planning_problem import training_graph
from rematplan.step_loading import LoadedStep


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements of a planned training step that was run.

    ``plan``: the plan that was run. ``measured_peak``, ``eager_peak``: the measured peaks in bytes with the plan and
    with plain autograd, parameters, buffers and batch included. ``seconds``, ``eager_seconds``: seconds of the
    fastest timed step with the plan and with plain autograd. ``losses``: the loss of each timed step. ``verification``:
    the comparison of all results with plain autograd; None if it was not requested. ``one_lane_seconds``: for a plan on
    two lanes (CUDA streams or threads), the seconds of the same plan on one lane; otherwise None.
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
    """The measured peak and times of a plan that was timed alternately with other plans.

    ``plan``: the plan; None stands for plain autograd. ``peak``: the measured peak in bytes, parameters, buffers and
    batch included. ``seconds``: seconds of the step in each round of timing.
    """

    plan: Plan | None
    peak: int
    seconds: tuple[float, ...]

    def overheads(self, base: MeasuredPlan) -> tuple[float, float, float]:
        """Return the minimum, median and maximum, over the rounds, of this plan's step time ÷ ``base``'s step time in
        the same round, − 1."""
        ratios = sorted(own / other - 1 for own, other in zip(self.seconds, base.seconds, strict=True))
        return ratios[0], statistics.median(ratios), ratios[-1]


def run_step(
    loaded: LoadedStep, plan: Plan, *, steps: int = 3, check: bool = False, progress: Progress = silent
) -> StepReport:
    """Run a planned step. Measure its peak and its time, and those of plain autograd; the two are timed alternately.

    No optimizer runs. The module's state is restored at the end.

    Args:
        loaded: the captured step.
        plan: a plan of the step's problem.
        steps: the number of timed steps, whose losses are reported.
        check: whether to compare loss, gradients and buffers with plain autograd.
        progress: called with the fraction done (0 to 1) and a short text.

    Raises:
        UsageError: the step was loaded without weights.
    """
    _check_runs(loaded)
    planned = planned_step(loaded, plan)
    module, batch, device = loaded.module, loaded.batch, loaded.step.device
    losses: list[float] = []

    def run_planned() -> None:
        module.zero_grad(set_to_none=True)
        losses.append(float(run_once(planned, batch)))

    run_eager = _running(loaded, module)
    verification = None
    if check:
        progress(0.0, "comparing with plain autograd")
        verification = verify(module, planned, batch, predicted=predicted_error(loaded, plan))
    resident = _held_bytes(loaded)
    with untouched(module):
        progress(0.3, "measuring peaks")
        peaks = [resident + _peak_above_entry(loaded, run) for run in (run_planned, run_eager)]
        progress(0.6, "timing")
        losses.clear()
        timed: dict[str, Callable[[], None]] = {"planned": run_planned, "eager": run_eager}
        if plan.lanes:
            timed["one lane"] = _one_lane(loaded, plan)
        seconds = interleaved_seconds(timed, device, steps)
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
    loaded: LoadedStep, plans: Sequence[Plan], *, rounds: int, progress: Progress
) -> tuple[MeasuredPlan, ...]:
    """Measure the peaks of plans and of plain autograd, then time all of them alternately in ``rounds`` rounds.

    The last item is plain autograd's. Plans on two lanes (CUDA streams or threads) run on one lane. Compare times
    within a round only: a slow period of the machine slows all plans of that round alike. The module's state is
    restored at the end.

    Raises:
        UsageError: the step was loaded without weights.
    """
    _check_runs(loaded)
    calls = {str(k): _one_lane(loaded, plan) for k, plan in enumerate(plans)} | {
        "eager": _running(loaded, loaded.module)
    }
    resident, peaks = _held_bytes(loaded), []
    with untouched(loaded.module):
        for done, call in enumerate(calls.values()):
            progress(0.5 * done / len(calls), "measuring peaks")
            peaks.append(resident + _peak_above_entry(loaded, call))
        progress(0.5, "timing")
        seconds = interleaved_rounds(calls, loaded.step.device, rounds).values()
    rows = zip((*plans, None), peaks, seconds, strict=True)
    return tuple(MeasuredPlan(*row) for row in rows)


def _check_runs(loaded: LoadedStep) -> None:
    if is_weightless(loaded.batch):
        raise UsageError(f"{loaded.step.name} was loaded without weights: it can be planned, but not run")


def _peak_above_entry(loaded: LoadedStep, run: Callable[[], None]) -> int:
    """Return the bytes that ``run``, a step of the module, allocates at its peak, gradients included."""
    loaded.module.zero_grad(set_to_none=True)
    release_libraries(loaded.step.device)
    return peak_above_entry(run, loaded.step.device)[0]


def planned_step(loaded: LoadedStep, plan: Plan) -> nn.Module:
    """Return a planned module that runs a step as `plan_module` would: it shares the parameters and buffers of
    ``loaded.module``, and returns the loss."""
    made = StepPlan(loaded.step, plan)
    options = PlanOptions(budget=plan.peak, costs=ROOFLINE)
    planned = module_with_plan(loaded.module, options, made, ops_of(loaded.bare), loaded.capture)
    return cast(nn.Module, Planning(planned).prepare(*loaded.batch))


def _running(loaded: LoadedStep, called: nn.Module) -> Callable[[], None]:
    def run() -> None:
        loaded.module.zero_grad(set_to_none=True)
        run_once(called, loaded.batch)

    return run


def _one_lane(loaded: LoadedStep, plan: Plan) -> Callable[[], None]:
    return _running(loaded, planned_step(loaded, replace(plan, lanes=None)))


def predicted_error(loaded: LoadedStep, plan: Plan) -> float:
    """Return the largest predicted relative error of the forward tensors that the backward reads. It is 0 if the step
    is exact (`LoadedStep.inexact`), else at least one rounding error."""
    if not loaded.inexact:
        return 0.0
    free = {call.name: CallCost(0.0) for call in loaded.step.priced_calls}
    # At least one rounding error, even if no inverse runs: the step may sum in another order than plain
    # autograd.
    rounding = max(torch.finfo(p.dtype).eps for p in loaded.module.parameters() if p.is_floating_point()) / 2
    return max(
        rounding,
        worst_error(with_loss_boundary(loaded.step, training_graph(loaded.step, free)), plan.schedule),
    )


def _held_bytes(loaded: LoadedStep) -> int:
    """Return the bytes that are resident before the step begins: parameters, buffers, batch and constants."""
    module = loaded.module
    return bytes_of([*module.parameters(), *module.buffers(), *loaded.batch, *loaded.step.constants.values()])
