"""Ops that compute gradients of a module's output such that the sum of their outer products is the Fisher matrix, or
has it as expectation.

The terms of a loss are summed, not averaged. The gradients for each kind of Fisher matrix and likelihood:

- ``mc categorical``: labels y are drawn from p, the softmax of the logits. The gradient is p − e_y, where e_y is a unit
  vector.
- ``mc gaussian``: the loss of one term is w ‖y − t‖², where w is 1 / d if the user's loss is a mean (as
  `torch.nn.MSELoss` is), else 1. The gradient is √(2 w) ε with normal ε.
- ``type-2 categorical``: the Hessian of cross entropy with respect to the logits is diag(p) − p pᵀ. The gradients √p_c
  (p − e_c), one for each class c, are the columns of an exact root of it.
- ``type-2 gaussian``: the Hessian is 2 w I. The gradients are √(2 w) times each unit vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Draws:
    """The random numbers with which labels are drawn (``fisher="mc"``). Each draw has a new generator, so that the
    global generators are not used.

    ``seed``: the seed of all draws. ``count``: the number of draws so far. These two fields are the whole state.
    """

    seed: int
    count: int = 0

    def next(self, device: torch.device) -> torch.Generator:
        """Return the generator of the next draw on a device, and count the draw. Each process of a distributed run
        draws other numbers."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        generator = torch.Generator(device).manual_seed(hash((self.seed, rank, self.count)) % 2**63)
        self.count += 1
        return generator


@dataclass(frozen=True)
class OutputGradient:
    """An op that computes a gradient of a module's output, with which an additional backward for the statistics begins.

    ``kind``: the kind of Fisher matrix and the likelihood, a key of `KINDS`. ``dim``: the output's dimension of
    classes. ``column``: used for ``type-2`` only, where the gradients are the columns of a root of the loss's Hessian:
    the index of the column, which is a class or a number of a Gaussian. ``weight``: the factor of ‖y − t‖² in the loss
    of a Gaussian. ``draws``: the random numbers for ``mc``.
    """

    kind: str
    dim: int
    column: int
    weight: float
    draws: Draws = field(compare=False)

    def __call__(self, output: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to ``output``, in the shape, strides and type of that tensor."""
        found = KINDS[self.kind](self, output.detach().to(torch.promote_types(output.dtype, torch.float32)))
        return torch.empty_like(output).copy_(found)

    def __str__(self) -> str:
        return f"statistics.output_gradient {self.kind} {self.dim} {self.column}"

    @property
    def source_name(self) -> str:
        """The name under which this op is called in the generated code of a compiled plan."""
        return "statistics_output_gradient"


def _drawn_labels(of: OutputGradient, logits: Tensor) -> Tensor:
    p = torch.softmax(logits, of.dim)
    rows = p.movedim(of.dim, -1)
    labels = torch.multinomial(rows.reshape(-1, rows.shape[-1]), 1, generator=of.draws.next(logits.device))
    labels = labels.view(rows.shape[:-1]).unsqueeze(of.dim)
    return p.scatter_add(of.dim, labels, p.new_full((), -1.0).expand(labels.shape))


def _root_of_hessian(of: OutputGradient, logits: Tensor) -> Tensor:
    p = torch.softmax(logits, of.dim)
    own = p.narrow(of.dim, of.column, 1)
    found = p * own.sqrt()
    found.narrow(of.dim, of.column, 1).sub_(own.sqrt())
    return found


def _normal(of: OutputGradient, output: Tensor) -> Tensor:
    noise = torch.empty_like(output).normal_(generator=of.draws.next(output.device))
    return noise * math.sqrt(2 * of.weight)


def _unit_vector(of: OutputGradient, output: Tensor) -> Tensor:
    found = torch.zeros_like(output)
    found.narrow(of.dim, of.column, 1).fill_(math.sqrt(2 * of.weight))
    return found


KINDS: Mapping[str, Callable[[OutputGradient, Tensor], Tensor]] = {
    "mc categorical": _drawn_labels,
    "mc gaussian": _normal,
    "type-2 categorical": _root_of_hessian,
    "type-2 gaussian": _unit_vector,
}
"""Functions that compute the gradient, by the kind of Fisher matrix and the likelihood."""
