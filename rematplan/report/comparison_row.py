"""A row of ``rematplan compare``: a plan of a training step, with its predicted and measured figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rematplan.planner.core.plan import Plan

if TYPE_CHECKING:
    from rematplan.api import StepReport


@dataclass(frozen=True)
class Rival:
    """One of several plans that a table compares, with its figures."""

    name: str
    """How it was found, such as ``auto with inverses``."""
    plan: Plan
    extra: float
    """The predicted extra time ÷ the predicted time without recomputation."""
    error: float
    """The largest predicted relative error of a recovered tensor; 0 if there is none."""
    report: StepReport | None = None
    """What a run of the plan measured; None if the plan was not run."""

    def fits(self, budget: int) -> str:
        """Return ``yes``, ``no``, or ``predicted`` if only the predicted peak is within ``budget`` bytes."""
        if self.plan.peak > budget:
            return "no"
        return "predicted" if self.report and self.report.measured_peak > budget else "yes"

    @property
    def gradient_error(self) -> float | None:
        """The largest measured relative difference to plain autograd, 0 if bit-equal; None if it was not compared."""
        checked = self.report.verification if self.report else None
        return checked.error if checked else None
