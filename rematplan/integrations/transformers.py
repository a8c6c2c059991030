"""Plan the model of a Hugging Face ``Trainer`` within a budget, tested with transformers 5.24, accelerate 1.15, peft
0.21, trl 1.16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, trainer

from rematplan.integrations.tested import warn_if_untested
from rematplan.integrations.trained_parts import TrainerBudget, part_of, plain_optimizers
from rematplan.ir import UsageError
from rematplan.plan_in_place import apply
from rematplan.plans.held_by_others import GRADIENTS

TESTED_TRANSFORMERS = ("5.24",)
"""The versions of transformers with which the tests were run."""
ENABLING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""The methods of a model that take `KEYWORDS`; the second is the older name."""
KEYWORDS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
LEFT_TO_CHECKPOINTS = {"use_reentrant", "preserve_rng_state"}
"""Keywords of `torch.utils.checkpoint` that trainers add, and that mean nothing to a plan."""


class RematplanCallback(TrainerBudget, TrainerCallback):  # type: ignore[misc]
    """Plan a trainer's model in place when training begins (`rematplan.apply`), its optimizer included in the budget.

    For `transformers.Trainer` and its subclasses, such as TRL's:
    ``Trainer(..., callbacks=[RematplanCallback(budget="8GiB")])``. The first training step makes the plan. The model
    stays planned after training; `rematplan.remove` undoes it.

    With gradient accumulation, the budget counts the gradients of earlier micro-batches from the start.

    Args:
        budget: as in `plan_module`.
        module: the name of the submodule that is planned, within the trainer's model. By default the whole model; or
            its ``base_model`` if TRL has fused the head with the loss, since then both run in tiles outside of a plan.
        options: the other keywords of `rematplan.apply`. Names in ``modules`` are those within the planned module.
            ``reserved`` replaces the trainer's optimizer.

    Raises:
        UsageError: there is no budget, or an option is unknown or malformed. `rematplan.apply` names the other errors.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any = None, **_: Any
    ) -> None:
        """Plan the model, or the stated part of it, in place; warn of an untested version."""
        del state, control
        warn_if_untested("transformers", TESTED_TRANSFORMERS)
        part = _unfused(model) if self.module is None else part_of(model, self.module)
        self.unseen = apply(part, self.budget, **_trained_by(args, optimizer) | self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Warn if the first step did not call the planned part."""
        del args, state, control
        self.warn_if_not_called()


def enable() -> None:
    """Let models of transformers, and every ``Trainer`` of this process, take a budget in the place of the keywords of
    activation checkpointing.

    ``TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"budget": "8GiB"})``, or with
    the older names ``gradient_checkpointing`` and ``gradient_checkpointing_kwargs``, then means a `RematplanCallback`
    with this budget. Further entries are keywords of `plan_module`, such as ``"loss_memory": "3x"``. Without an entry
    ``budget``, activation checkpointing works as before.
    """
    warn_if_untested("transformers", TESTED_TRANSFORMERS)
    for name in ENABLING:
        method = getattr(PreTrainedModel, name, None)
        if method is not None and not hasattr(method, "rematplan"):
            setattr(PreTrainedModel, name, _taking_budgets(method))
    if _CountOptimizer not in trainer.DEFAULT_CALLBACKS:
        trainer.DEFAULT_CALLBACKS.append(_CountOptimizer)


_enabled: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""The models whose checkpointing was given a budget, with the options of their plans."""


class _CountOptimizer(TrainerCallback):  # type: ignore[misc]
    """Tells the plans of models that `enable` serves of the trainer's optimizer."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any = None, **_: Any
    ) -> None:
        del state, control
        for part in model.modules():
            if part in _enabled:
                apply(_unfused(part), **_trained_by(args, optimizer) | _enabled[part])


def _taking_budgets(method: Callable[..., None]) -> Callable[..., None]:
    """Return a variant of a method that enables checkpointing: given a ``budget``, it plans the model in place instead.
    `UsageError` with options that a budget replaces."""

    @functools.wraps(method)
    def enabling(model: Any, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` or, with a ``budget``, plan ``model`` in place and note it in ``_enabled``. `UsageError` with
        options that a budget replaces."""
        given = next((kwargs[name] for name in KEYWORDS if kwargs.get(name)), args[0] if args else None)
        if not isinstance(given, Mapping) or "budget" not in given:
            method(model, *args, **kwargs)
            return
        if kwargs.get("every_n_layers", 1) != 1 or kwargs.get("offload"):
            raise UsageError("a budget replaces every_n_layers and offload; leave them out")
        _enabled[model] = {key: value for key, value in given.items() if key not in LEFT_TO_CHECKPOINTS}
        apply(_unfused(model), **_enabled[model])

    enabling.rematplan = True  # type: ignore[attr-defined]
    return enabling


def _trained_by(args: Any, optimizer: Any) -> dict[str, Any]:
    """Return the options of plans that follow from a trainer's arguments and its optimizer."""
    sums = [GRADIENTS] * (args.gradient_accumulation_steps > 1)
    return {"reserved": [*plain_optimizers([] if optimizer is None else [optimizer]), *sums]}


def _unfused(model: nn.Module) -> nn.Module:
    """Return the part of a model that is planned: its ``base_model`` if TRL has fused the head with the loss, else the
    model."""
    for part in model.modules():
        forward = getattr(vars(part).get("forward"), "__func__", None)
        if getattr(forward, "__globals__", {}).get("__name__", "").startswith("trl."):
            backbone: nn.Module = part.base_model  # type: ignore[assignment]
            return backbone
    return model
