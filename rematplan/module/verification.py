"""Compare a planned training step with plain autograd: loss, gradients, buffers and random state, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rematplan.planner.core.inversion_error import gradient_error
from rematplan.runtime.capture.restore_state import same_buffers, same_draws, same_gradients


def run_once(module: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run the training step ``loss = module(*batch); loss.backward()``, and return the loss, detached.

    The module, planned or not, must return a scalar loss."""
    loss: torch.Tensor = module(*batch)
    loss.backward()
    return loss.detach()


@dataclass(frozen=True, slots=True)
class Difference:
    """A result of a training step in which plain autograd and the planned step differ by at least one bit."""

    name: str
    """The result, such as ``gradient NAME``."""
    absolute: float
    """The largest absolute difference of an element; infinite if only one step has it, or the shapes differ."""
    relative: float
    """The L2 norm of the difference divided by that of the result in plain autograd; infinite like ``absolute``. For
    gradients the divisor is at least `FLOOR` × the norm of all: one that should be 0 consists of rounding errors."""


FLOOR = 1e-2
"""Differences of gradients are relative to at least this share of the L2 norm of all gradients."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of comparing a planned step bit by bit with plain autograd, from the same state and seed."""

    compared: int
    """The number of results of plain autograd."""
    differences: tuple[Difference, ...]
    """The results that differ."""
    predicted: float = 0.0
    """The predicted relative error of recomputed tensors; 0 if the step must be bit-equal."""

    @property
    def bit_equal(self) -> bool:
        """Whether the loss, all gradients, all buffers and the random state afterwards agree in every bit."""
        return not self.differences

    @property
    def error(self) -> float:
        """The largest relative difference of a result (`Difference.relative`); 0 if all results are bit-equal."""
        return max((d.relative for d in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether the step is bit-equal, or draws alike and errs by at most ``gradient_error(predicted)``."""
        drawn = any(d.name.startswith("random state") for d in self.differences)
        return self.bit_equal or (not drawn and self.error <= gradient_error(self.predicted))

    def __str__(self) -> str:
        """Return one line: bit-equal, different as predicted, or different, with the largest relative difference."""
        if self.bit_equal:
            return f"loss, gradients and buffers are bit-equal to plain autograd ({self.compared} tensors)"
        worst = max(self.differences, key=lambda d: d.relative)
        differ = f"{len(self.differences)} of {self.compared} tensors differ from plain autograd"
        if self.passed:
            return (
                f"{differ}, as predicted: at most by {worst.relative:.2e} relative ({worst.name}); the limit is "
                f"{gradient_error(self.predicted):.2e}, since recomputed tensors with an error of "
                f"{self.predicted:.2e} may be on the other side of a ReLU's kink"
            )
        largest = f"{differ}; the largest difference is {worst.relative:.2e} relative ({worst.name})"
        if not self.predicted or worst.relative == math.inf:
            return largest
        return (
            f"{largest}; {gradient_error(self.predicted):.2e} was predicted, and tensors of few elements may differ by "
            f"more, if one argument of a ReLU is on the other side of its kink"
        )


def verify(
    module: nn.Module,
    planned: nn.Module,
    batch: Sequence[torch.Tensor],
    seed: int = 0,
    predicted: float = 0.0,
) -> Verification:
    """Compare a planned training step with plain autograd, from the same buffers and seed. All state is restored
    afterwards."""
    expected = _results(module, module, batch, seed)
    found = _results(module, planned, batch, seed)
    return Verification(len(expected), tuple(tensor_differences(expected, found)), predicted)


def tensor_differences(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> list[Difference]:
    """Return what differs between the tensors of two runs, by at least a bit, or because one run lacks it. Names of
    gradients begin with ``gradient``: their differences are relative to at least `FLOOR` of the norm of all
    gradients."""
    gradients = [_wide(t).norm() for name, t in expected.items() if name.startswith("gradient ")]
    floor = FLOOR * float(torch.stack(gradients).norm()) if gradients else 0.0
    differences = []
    for name in dict.fromkeys((*expected, *found)):
        a, b = expected.get(name), found.get(name)
        if a is None or b is None or a.shape != b.shape:
            differences.append(Difference(name, math.inf, math.inf))
        elif not same_bits(a, b):
            distance = (_wide(a) - _wide(b)).abs()
            scale = max(float(_wide(a).norm()), floor if name.startswith("gradient ") else 0.0) or 1.0
            differences.append(Difference(name, float(distance.max()), float(distance.norm()) / scale))
    return differences


def _wide(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, dense; of complex numbers, their two parts."""
    t = dense(t)
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()


def dense(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is if it is dense; a sparse one with all its zeros."""
    return t if t.layout == torch.strided else t.to_dense()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape, layout and bits; sparse ones are compared dense. NaNs with
    the same bits count as equal; 0 and −0 differ."""
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    a, b = dense(a), dense(b)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return torch.equal(a, b)
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(as_integers), b.contiguous().view(as_integers))


def _results(
    module: nn.Module, called: nn.Module, batch: Sequence[torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    with untouched(module):
        torch.manual_seed(seed)
        results = {"loss": run_once(called, batch)}
        results |= {f"random state{place}": state for place, state in _random_states().items()}
        results |= {f"gradient {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
        results |= {f"buffer {n}": b.clone() for n, b in module.named_buffers()}
    return results


def _random_states() -> dict[str, torch.Tensor]:
    """Return the states of PyTorch's generators: ``""`` for the CPU, ``" of cuda:N"`` for CUDA device N."""
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"": torch.get_rng_state(), **{f" of cuda:{at}": state for at, state in enumerate(on_cuda)}}


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """A context that begins without gradients, and restores gradients, buffers and all random states."""
    with same_buffers(module), same_gradients(module), same_draws():
        yield
