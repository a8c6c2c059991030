"""One row of the output of ``rematplan compare``: a plan of a training step, with its predicted and measured
figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rematplan.planner.core.plan import Plan

if TYPE_CHECKING:
    from rematplan.api import StepReport


@dataclass(frozen=True)
class Rival:
    """One of several plans of a training step that a table compares, with its predicted and measured figures.

    ``name``: how the plan was found, such as ``auto with inverses``. ``plan``: the plan. ``extra``: the predicted extra
    time, as a share of the predicted time of the step without recomputation. ``error``: the largest predicted relative
    error of a tensor that the plan recovers by inverses (ops that compute an input from an output); 0 if there is none.
    ``report``: the measurements; None if the plan was not run.
    """

    name: str
    plan: Plan
    extra: float
    error: float
    report: StepReport | None = None

    def fits(self, budget: int) -> str:
        """Return whether the plan fits ``budget`` bytes, as a word for a table.

        ``no``: the predicted peak is above the budget. ``predicted``: the predicted peak is within the budget, but the
        measured peak is above it. ``yes``: otherwise.
        """
        if self.plan.peak > budget:
            return "no"
        return "predicted" if self.report and self.report.measured_peak > budget else "yes"

    @property
    def gradient_error(self) -> float | None:
        """The largest measured relative difference between the planned step and plain autograd in a loss, gradient or
        buffer.

        0 if all are bit-equal. None if the plan was not run, or if its results were not compared with plain autograd.
        """
        checked = self.report.verification if self.report else None
        return checked.error if checked else None
