"""Ops that compute gradients of a module's output whose summed outer products are the Fisher matrix
(``type-2``) or have it as expectation (``mc``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Draws:
    """The random numbers with which labels are drawn (``fisher="mc"``). Each draw makes a new generator; the
    global generators are not used."""

    seed: int
    """The seed of all draws."""
    count: int = 0
    """The number of draws so far. With ``seed`` it is the whole state."""

    def next(self, device: torch.device) -> torch.Generator:
        """Return the generator of the next draw on a device, and count the draw. Its seed differs between the
        ranks of a distributed run."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        generator = torch.Generator(device).manual_seed(hash((self.seed, rank, self.count)) % 2**63)
        self.count += 1
        return generator


@dataclass(frozen=True)
class OutputGradient:
    """An op that computes the gradient of a module's output with which a backward for the statistics begins."""

    kind: str
    """The kind of Fisher matrix and the likelihood, a key of `KINDS`."""
    dim: int
    """The output's dimension of classes, or of the numbers of a Gaussian."""
    column: int
    """For ``type-2``, the column of the Hessian's root: a class, or a number of a Gaussian. Unused for ``mc``."""
    weight: float
    """The factor of ‖y − t‖² in the loss of a Gaussian."""
    draws: Draws = field(compare=False)
    """The random numbers for ``mc``."""

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
    # The gradient p − e_y of cross entropy, for a label y drawn from p.
    labels = torch.multinomial(rows.reshape(-1, rows.shape[-1]), 1, generator=of.draws.next(logits.device))
    labels = labels.view(rows.shape[:-1]).unsqueeze(of.dim)
    return p.scatter_add(of.dim, labels, p.new_full((), -1.0).expand(labels.shape))


def _root_of_hessian(of: OutputGradient, logits: Tensor) -> Tensor:
    p = torch.softmax(logits, of.dim)
    # The Hessian of cross entropy with respect to the logits is diag(p) − p pᵀ. The columns √p_c (p − e_c),
    # one for each class c, are an exact root of it.
    own = p.narrow(of.dim, of.column, 1)
    found = p * own.sqrt()
    found.narrow(of.dim, of.column, 1).sub_(own.sqrt())
    return found


def _normal(of: OutputGradient, output: Tensor) -> Tensor:
    # The loss of one term is w ‖y − t‖², with the Hessian 2 w I.
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
