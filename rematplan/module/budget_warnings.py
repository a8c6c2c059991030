"""The warnings of a planned module that a user's loop keeps in memory what a plan would free, beyond the budget, and
that it sums gradients otherwise."""

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
        """Warn that a call begins while earlier calls, which hold ``held`` bytes, wait for their backward: under
        autocast with its cache, and if ``held`` and the plan's peak exceed its budget. ``of_part``: whether the budget
        is for other modules, too, and not compared."""
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
        """Warn that a backward retains the ``held`` bytes of its forward: if these and the plan's peak exceed its
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
