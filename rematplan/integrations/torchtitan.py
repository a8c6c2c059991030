"""Plan each transformer block of a torchtitan model within a budget, tested with torchtitan 0.3."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from rematplan.integrations.tested import warn_if_untested
from rematplan.ir import UsageError
from rematplan.plan_in_place import apply

TESTED_TORCHTITAN = ("0.3",)
"""The versions of torchtitan with which the tests were run."""


class BudgetAC(ActivationCheckpointing):  # type: ignore[misc]
    """Plans each block of a model in place (`rematplan.apply`) where torchtitan would put checkpoints around them.
    ``activation_checkpoint=BudgetAC.Config(budget="60% of activations")`` in a trainer's configuration. The budget is
    of one block's forward and backward, its weights included."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """The configuration. The fields of its base mean nothing to a plan."""

        budget: str = ""
        """The budget of each block, in the form that `plan_module` takes."""
        strategy: str = "auto"
        """The strategy of the plans."""
        costs: str = "profile"
        """The source of the ops' costs."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        """Plan a transformer block in place, within the budget of the configuration; `UsageError` if it has none."""
        del base_fqn
        warn_if_untested("torchtitan", TESTED_TORCHTITAN)
        config = self.config
        if not config.budget:
            raise UsageError(
                "there is no budget; state one, such as BudgetAC.Config(budget='60% of activations')"
            )
        return apply(module, config.budget, strategy=config.strategy, costs=config.costs)
