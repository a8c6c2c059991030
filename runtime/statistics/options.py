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
    """Options for Kronecker-factored statistics of training steps: for each layer, Σ a aᵀ over its inputs and
    Σ g gᵀ over the gradients of its outputs, whose Kronecker product approximates the Fisher matrix. `Factors` says
    how they are scaled.

    ``every``: n, to compute statistics in every n-th training step. A training step ends with the optimizer's step,
    so either all of its micro-batches have statistics or none has. ``approx``: with ``expand``, every row of
    a layer's matrix product counts; with ``reduce``, each sample counts as one row: the mean of its inputs
    and the sum of its gradients over places or tokens (Eschenhagen et al. 2023). ``share``: the share of the
    rows that are used, above 0 and up to 1. ``diagonal_above``: the number of rows above which only the diagonal of
    a factor is computed (that of a vocabulary, for example, whose matrix would need gigabytes).

    ``fisher``: ``mc`` draws labels from the model's own distribution and runs one more backward for them,
    without gradients of weights. ``type-2`` uses the exact Hessian of the loss with respect to the outputs,
    with one more backward for each class, or for each number of a Gaussian's output. ``empirical`` uses the
    backward of the user's loss. ``seed``: for drawing labels; the global generators are not used.

    ``output``: the position of the output, among the tensors that the module returns, from which the loss is
    computed. ``likelihood``: ``categorical`` if the output has logits for cross entropy, ``gaussian`` if it
    has means for `torch.nn.MSELoss`. ``class_dim``: the output's dimension of classes, or of the numbers of
    one Gaussian; all other dimensions count terms of the loss. ``loss_reduction``: whether the user's loss is
    the ``mean`` or the ``sum`` of its terms. ``terms``: the number of terms, if it does not follow from the
    output (a loss inside the model, ignored padding). If None it follows from the output; for a module that
    returns a scalar it is the first dimension of its first input.

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
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.every < 1:
            raise UsageError(f"every is {self.every}; it is a number of steps, 1 or more")
        if not 0 < self.share <= 1:
            raise UsageError(f"share is {self.share}; it is above 0 and at most 1")
        if self.terms is not None and self.terms < 1:
            raise UsageError(f"terms is {self.terms}; a loss has 1 or more")
