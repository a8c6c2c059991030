"""One row of a comparison: a way to run the step, with its predicted and measured figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rematplan.planner.core.plan import Plan

if TYPE_CHECKING:
    from rematplan.api import StepReport


@dataclass(frozen=True)
class Rival:
    """A way to run the step. ``extra``: predicted time beyond that of the step without recomputation, as a share of
    it. ``error``: predicted, of what inverses bring back. ``report``: None if it was not run."""

    name: str
    plan: Plan
    extra: float
    error: float
    report: StepReport | None = None

    @property
    def gradient_error(self) -> float | None:
        """Measured: the largest relative difference from plain autograd, 0 where all is bit-equal."""
        checked = self.report.verification if self.report else None
        return checked.error if checked else None
