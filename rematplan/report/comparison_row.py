"""One row of a comparison: a plan of the step, with its predicted and measured figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rematplan.planner.core.plan import Plan

if TYPE_CHECKING:
    from rematplan.api import StepReport


@dataclass(frozen=True)
class Rival:
    """One row of the comparison of strategies: a plan of a step, with its predicted and measured figures.

    ``name``: how the plan was found, such as ``auto with inverses``. ``plan``: the plan. ``extra``: predicted time ÷
    that of the step without recomputation, − 1. ``error``: the predicted relative error of tensors that inverses (ops
    that compute an input from an output) recover. ``report``: the measurements; None if the plan was not run.
    """

    name: str
    plan: Plan
    extra: float
    error: float
    report: StepReport | None = None

    def fits(self, budget: int) -> str:
        """Return ``yes`` if the plan's peak is within ``budget`` bytes, otherwise ``no``.

        ``predicted`` if the predicted peak is within the budget and the measured peak is above it.
        """
        if self.plan.peak > budget:
            return "no"
        return "predicted" if self.report and self.report.measured_peak > budget else "yes"

    @property
    def gradient_error(self) -> float | None:
        """The largest measured relative difference of a gradient from plain autograd; 0 if all are bit-equal; None if
        not verified."""
        checked = self.report.verification if self.report else None
        return checked.error if checked else None
