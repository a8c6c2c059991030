"""The memory that is reserved for a loss outside of the planned module: its peak, and what stays allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.losses_among_outputs import in_own_losses

COPIES = 5
"""The assumed peak of a loss, in tensors of the outputs' size and of float32 or wider, gradients of the
outputs included. Almost every loss needs at most this many: mean squared error, L1, dice and divergences need
four, a squared difference written as separate ops needs five."""
FEWER = 4
"""The same number for large outputs. Cross entropy and mean squared error need three."""
AMPLE_SHARE = 1 / 8
"""The share of the step's peak up to which `COPIES` is assumed rather than `FEWER`."""
SCALARS = 8
"""The assumed number of further one-element tensors of a loss: a sum of weights, a temperature, a penalty."""


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes that a loss outside of the model needs in addition to the outputs and their gradients.

    ``peak``: at its peak. ``kept``: the part of ``peak`` that stays allocated until the step ends: the caller of
    backward holds the loss and its gradient meanwhile. (The scalar that `mse_loss` or `smooth_l1_loss` returns keeps
    a storage of the outputs' size alive.)
    """

    peak: int
    kept: int

    @classmethod
    def of_peak(cls, step: CapturedStep, peak: int, used: frozenset[str] = frozenset()) -> LossMemory:
        """Return the memory of a loss whose peak is known. Of that peak the loss is assumed to keep the scalar loss
        and its gradient, and one tensor of the size of each output that it reads.

        Args:
            step: the captured step.
            peak: bytes, in addition to the outputs and their gradients.
            used: positions (as text) of the outputs that the loss does not read.
        """
        scalars = 2 * _scalar(step)
        return cls(peak, max(scalars, min(peak, _each(step, used) + scalars)))

    @classmethod
    def of_copies(cls, step: CapturedStep, copies: float, used: frozenset[str] = frozenset()) -> LossMemory:
        """Return the memory of a loss whose peak is given in tensors of the outputs' size.

        Args:
            step: the captured step.
            copies: the number of these tensors, of float32 or wider, gradients of the outputs included.
            used: positions (as text) of the outputs that the loss does not read.
        """
        tangents = sum(allocated(fake.nbytes, fake.device) for fake in _read(step, used))
        more = max(0, int(copies * _each(step, used)) - tangents)
        return cls.of_peak(step, more + SCALARS * _scalar(step), used)

    @classmethod
    def usual(cls, step: CapturedStep, peak: int) -> LossMemory:
        """Return the assumed memory of an unknown loss: `COPIES` tensors of the outputs' size, or `FEWER` if the
        outputs are large.

        A scalar output is assumed to be a loss that the model computes. That output, and the outputs from which it is
        computed, need no bytes here, except those for which a gradient has arrived before (`CapturedStep.arrived`).
        Other outputs, from which no scalar output is computed, are assumed to have a loss outside the model.

        Args:
            step: the captured step.
            peak: bytes, of the step without recomputation and without a loss.
        """
        used = in_own_losses(step) - step.arrived
        if not _read(step, used):
            return cls.of_peak(step, 0)
        ample = cls.of_copies(step, COPIES, used)
        return ample if ample.peak <= AMPLE_SHARE * peak else cls.of_copies(step, FEWER, used)


NO_LOSS = LossMemory(0, 0)


def _read(step: CapturedStep, used: frozenset[str]) -> list[torch.Tensor]:
    """Return the fake gradients of the outputs that a loss reads.

    Outputs that the forward sets as attributes (a normalised weight, for example) are left out: a loss seldom
    reads them.
    """
    others = used | step.attributes
    return [step.values[i.value].fake for i in step.inputs if i.kind == "tangent" and i.target not in others]


def _each(step: CapturedStep, used: frozenset[str] = frozenset()) -> int:
    """Return the bytes of the outputs that a loss reads, in float32 or their own wider type."""
    return sum(allocated(fake.numel() * max(fake.itemsize, 4), fake.device) for fake in _read(step, used))


def _scalar(step: CapturedStep) -> int:
    return allocated(8, step.device)
