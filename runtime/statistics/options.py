"""What is asked of the statistics of a step: `rematplan.Kronecker`."""

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
"""The values of the options that are words."""


@dataclass(frozen=True, kw_only=True)
class Kronecker:
    """Kronecker-factored statistics in every n-th training step. `factors` says what they are and how they are scaled.

    ``every``: steps from one with statistics to the next; a training step ends with an optimizer's step, so that all
    micro-batches of a step have statistics or none has. ``approx``: ``expand`` takes every row of a layer's matrix
    product, ``reduce`` one row a sample: the mean of its inputs and the sum of its gradients over places or tokens
    (Eschenhagen et al. 2023). ``share``: of the rows that are taken, above 0 and up to 1. ``diagonal_above``: of a
    factor with more rows (a vocabulary's, say) only the diagonal is summed; dense it would take gigabytes.

    ``fisher``: ``mc`` draws labels from the model's own distribution and goes backward once more for them, without
    gradients of weights; ``type-2`` takes the exact Hessian of the loss in the outputs, by a further backward for each
    class, or for each number of a Gaussian's output; ``empirical`` takes the backward of the user's loss. ``seed``: of
    the labels that are drawn; the global generators are left alone.

    ``output``: the position of the output, among the tensors that the module returns, that a loss is taken of.
    ``likelihood``: what its numbers are: ``categorical`` logits of cross entropy, or ``gaussian`` means of
    `torch.nn.MSELoss`. ``class_dim``: the output's dimension that holds classes, or the numbers of one Gaussian; all
    others count terms of the loss. ``loss_reduction``: whether the user's loss is the ``mean`` or the ``sum`` of its
    terms. ``terms``: their number, where it is not that of the output (a loss inside of the model, padding that is
    ignored); of a module that returns the loss itself it is by default the first dimension of its first input.

    Raises:
        UsageError: a value that an option cannot have.
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
