"""Plan the network of a LightningModule within a budget in bytes.

Tested with pytorch-lightning 2.6. Install ``rematplan[lightning]``.
"""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from rematplan.integrations.tested import warn_if_untested
from rematplan.integrations.trained_parts import TrainerBudget, part_of, plain_optimizers
from rematplan.ir import UsageError
from rematplan.plan_in_place import apply
from rematplan.plans.held_by_others import GRADIENTS

TESTED_LIGHTNING = ("2.6",)
"""The versions of pytorch-lightning with which the tests were run."""


class RematplanCallback(TrainerBudget, Callback):  # type: ignore[misc]
    """Plan the network inside of a LightningModule in place when training begins (`rematplan.apply`), the trainer's
    optimizers included in the budget.

    Lightning clears gradients between a step's forward and its backward, so the budget counts those of the step
    before, too.

    ``Trainer(callbacks=[RematplanCallback(budget="8GiB")])``. The loss, ``self.log`` and what else
    ``training_step`` does stay outside of the plan. The first training step makes the plan. The network stays planned
    after training; `rematplan.remove` undoes it.

    Args:
        budget: as in `plan_module`.
        module: the name of the submodule that is planned, within the LightningModule; an empty name for the forward of
            the LightningModule itself, if ``training_step`` calls ``self(...)``. By default its only direct submodule
            with trainable parameters.
        options: the other keywords of `rematplan.apply`. Names in ``modules`` are those within the planned module.
            ``reserved`` replaces the trainer's optimizers.

    Raises:
        UsageError: there is no budget, or an option is unknown or malformed. When training begins: there is no such
            submodule, there are several to choose from, or a ``BatchSizeFinder`` is used, whose trials run without
            callbacks and so without a plan. `rematplan.apply` names the other errors.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise `UsageError` for a trainer that tries batch sizes, since these trials run without a plan; warn of
        untested versions."""
        del pl_module, stage
        warn_if_untested("pytorch-lightning", TESTED_LIGHTNING)
        kinds = {kind.__name__ for one in trainer.callbacks for kind in type(one).__mro__}
        if "BatchSizeFinder" in kinds:  # of pytorch_lightning or of lightning
            raise UsageError(
                "BatchSizeFinder tries batches without callbacks, so without a plan; state the batch size, and "
                "lower it if the budget is refused"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan the network in place."""
        part = part_of(pl_module, _only_network(pl_module) if self.module is None else self.module)
        trained = {"reserved": [*plain_optimizers(trainer.optimizers), GRADIENTS]}
        self.unseen = apply(part, self.budget, **trained | self.options)

    def on_train_batch_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Warn if the first step did not call the planned part."""
        self.warn_if_not_called()


def _only_network(model: nn.Module) -> str:
    """Return the name of the only direct submodule with trainable parameters; `UsageError` if there is not one."""
    trained = [
        name
        for name, child in model.named_children()
        if any(parameter.requires_grad for parameter in child.parameters())
    ]
    if len(trained) != 1:
        raise UsageError(
            f"{type(model).__name__} trains {', '.join(trained) or 'no submodule'}: name the one to plan, such as "
            f"module={[*trained, 'net'][0]!r}, or '' for the forward of {type(model).__name__} itself"
        )
    return trained[0]
