"""The options for the statistics of a step: `rematplan.Kronecker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rematplan.ir import UsageError

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "approx": ("expand", "reduce"),
        "fisher": ("mc", "empirical", "type-2"),
        "likelihood": ("categorical", "gaussian"),
        "loss_reduction": ("mean", "sum"),
    }
)
"""The allowed values of the options that are strings."""


@dataclass(frozen=True, kw_only=True)
class Kronecker:
    """Options for Kronecker-factored statistics of training steps: for each layer, Σ a aᵀ over its inputs and Σ g gᵀ
    over the gradients of its outputs, whose Kronecker product approximates the Fisher matrix. `Factors` says how they
    are scaled.

    ``every``: n, to compute statistics in every n-th training step. A training step ends with the optimizer's step.
    Either all micro-batches of a training step have statistics or none has. ``approx``: with ``expand``, every row of a
    layer's matrix product counts. With ``reduce``, each sample counts as one row: the mean of its inputs, and the sum
    of its gradients, over positions or tokens (Eschenhagen et al. 2023). ``share``: the share of the rows that are
    used, above 0 and up to 1. ``diagonal_above``: if a factor has more rows than this, only its diagonal is computed.
    (The factor of a vocabulary, for example, would need gigabytes.)

    ``fisher``: ``mc`` draws labels from the model's own distribution and runs one more backward for them, without
    gradients of weights. ``type-2`` uses the exact Hessian of the loss with respect to the outputs, with one more
    backward for each class, or for each number that the output has for a Gaussian. ``empirical`` uses the backward of
    the user's loss. ``seed``: for drawing labels; the global generators are not used.

    ``output``: the position, among the tensors that the module returns, of the output from which the loss is computed.
    ``likelihood``: ``categorical`` if this output has logits for cross entropy, ``gaussian`` if it has means for
    `torch.nn.MSELoss`. ``class_dim``: the output's dimension of classes, or of the numbers of one Gaussian; all other
    dimensions count terms of the loss. ``loss_reduction``: whether the user's loss is the ``mean`` or the ``sum`` of
    its terms. ``terms``: the number of terms. State it if the output does not tell it (for a loss inside the model, or
    ignored padding). If it is None, it is computed from the output's shape; for an output that is a scalar it is the
    size of the first dimension of the module's first input.

    Raises:
        UsageError: an option has a value that is not allowed.
    """

    every: int = 1
    approx: str = "expand"
    fisher: str = "mc"
    share: float = 1.0
    diagonal_above: int = 16_384
    likelihood: str = "categorical"
    loss_reduction: str = "mean"
    output: int = 0
    class_dim: int = -1
    terms: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UsageError` if an option is unknown or out of its range."""
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        if not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"every is {self.every!r}; it is a number of steps, 1 or more")
        for name in ("diagonal_above", "output", "class_dim", "seed"):
            if not isinstance(getattr(self, name), int):
                raise UsageError(f"{name} is {getattr(self, name)!r}; it is a whole number")
        if not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise UsageError(f"share is {self.share!r}; it is above 0 and at most 1")
        if self.terms is not None and (not isinstance(self.terms, int) or self.terms < 1):
            raise UsageError(f"terms is {self.terms!r}; a loss has 1 or more")
