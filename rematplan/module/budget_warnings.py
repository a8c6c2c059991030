"""Warnings that a training loop keeps in memory what a module's plan would free, or sums gradients in another precision
than eager mode."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rematplan.ir import show_bytes
from rematplan.planner.core.plan import Plan
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.guards.call_key import AUTOCAST


@dataclass
class BudgetWarnings:
    """The warnings that one planned module has given. ``name``: the model's name."""

    name: str
    told: set[str] = field(default_factory=set)
    """The reasons for which a warning was given. Each gets one."""

    def pending(self, plan: Plan, held: int, *, of_part: bool) -> None:
        """Warn, once each, of a call before earlier backwards: if autocast caches weights, and if ``held``
        plus the plan's peak exceeds its budget. ``held``: the bytes of the earlier calls. ``of_part``: whether the
        budget is for other modules, too, so that it is not compared."""
        if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, AUTOCAST)):
            self._tell(
                "cast",
                f"{self.name} is called again under autocast before the backward of an earlier call. In eager mode, "
                f"calls in one autocast context share the cast weights, and sum their gradients in the lower "
                f"precision; planned calls sum them in the weights' own type, so bits differ",
            )
        if of_part or plan.budget is None or held + plan.peak <= plan.budget:
            return
        self._tell(
            "pending",
            f"{self.name} is called again before the backward of an earlier call, which holds {show_bytes(held)}. "
            f"This call needs up to {show_bytes(plan.peak)} in addition, and the budget of "
            f"{show_bytes(plan.budget)} bounds one call. Plan it by plan_stage: in_flight=2 for two before a backward",
        )

    def retained(self, plan: Plan, held: int, *, of_part: bool) -> None:
        """Warn once that a backward retains the ``held`` bytes of its forward: if these plus the plan's peak exceed its
        budget, or always with ``of_part``. ``of_part``: whether the budget is for other modules, too."""
        needed, most = plan.peak + held, plan.budget
        if not of_part and (most is None or needed <= most):
            return
        of_step = "" if of_part else f": this step needs about {show_bytes(needed)}"
        within = "the budget" if of_part or most is None else f"the budget of {show_bytes(most)}"
        self._tell(
            "retained",
            f"a backward of {self.name} retains its graph (retain_graph or create_graph), which keeps "
            f"{show_bytes(held)} that the plan would free{of_step}; one backward of the sum of the losses stays within "
            f"{within}",
        )

    def _tell(self, reason: str, text: str) -> None:
        if reason not in self.told:
            self.told.add(reason)
            warn(text)
