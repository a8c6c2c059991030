"""One row of a comparison: a plan of the step, with its predicted and measured figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rematplan.planner.core.plan import Plan

if TYPE_CHECKING:
    from rematplan.api import StepReport


@dataclass(frozen=True)
class Rival:
    """A plan of the step, under the name of how it was found.

    ``extra``: predicted time beyond that of the step without recomputation, as a share of it. ``error``: the predicted
    relative error of tensors that inverses recover. ``report``: None if the plan was not run.
    """

    name: str
    plan: Plan
    extra: float
    error: float
    report: StepReport | None = None

    def fits(self, budget: int) -> str:
        """Return whether the peak is within ``budget`` bytes: ``yes``, ``no`` or ``predicted``.

        ``predicted``: the predicted peak is within the budget, the measured one is not.
        """
        if self.plan.peak > budget:
            return "no"
        return "predicted" if self.report and self.report.measured_peak > budget else "yes"

    @property
    def gradient_error(self) -> float | None:
        """The measured largest relative difference from plain autograd; 0 where all gradients are bit-equal."""
        checked = self.report.verification if self.report else None
        return checked.error if checked else None
