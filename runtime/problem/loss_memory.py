"""The bytes that a plan reserves for a loss outside of the planned module: at its peak, until its backward, and
until the step ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rematplan.ir import ModelError, first_line
from rematplan.runtime.costs.measure import peak_and_rest_above_entry
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.losses_among_outputs import in_own_losses

COPIES = 5
"""The assumed peak of a loss, as a multiple of the bytes of the outputs in float32 or wider. The gradients of the
outputs are included. Almost every loss needs at most this. Measured with float32 outputs on a CPU: `mse_loss` and
`binary_cross_entropy_with_logits` need 2, cross entropy needs 3, the mean of squares, L1 and dice need 4, a squared
difference written as separate ops needs 5."""
FEWER = 4
"""The assumed peak of a loss if the outputs are large, as a multiple of the same bytes. It is enough for cross entropy,
the usual loss of large outputs."""
AMPLE_SHARE = 1 / 8
"""The loss's peak according to `COPIES`, as a share of the step's peak, up to which `COPIES` is assumed rather than
`FEWER`."""
SCALARS = 8
"""The assumed number of further one-element tensors of a loss: a sum of weights, a temperature, a penalty."""


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes that a loss outside of the model needs in addition to the outputs and their gradients."""

    peak: int
    """The bytes at the loss's peak, including ``kept``, unless the stated peak is smaller than ``kept``."""
    kept: int
    """The bytes that stay until the step ends, because the caller keeps the loss and its gradient during the backward.
    The scalar that `mse_loss` or `smooth_l1_loss` returns keeps a storage of the outputs' size."""
    saved: int | None = None
    """The bytes between the loss and its backward, if other micro-batches run in between; None: not known, ``peak``
    is assumed."""
    forward: int = 0
    """Bytes by which the loss exceeds ``peak`` before its backward. Only `measured` tells the two apart."""
    dense: bool = False
    """Whether the outputs' gradients surely have the outputs' strides, so that the backward need not copy them."""

    @property
    def between(self) -> int:
        """The bytes that are allocated between the loss and its backward, ``peak`` if that is not known."""
        return self.peak if self.saved is None else self.saved

    @classmethod
    def of_peak(cls, step: CapturedStep, peak: int, unread: frozenset[str] = frozenset()) -> LossMemory:
        """Return the memory of a loss with a known peak, of which one tensor for each output that it reads stays
        until the step ends."""
        # The loss and its gradient, counted even if the peak has no bytes for them.
        scalars = 2 * _scalar(step)
        return cls(peak, max(scalars, min(peak, _output_bytes(step, unread) + scalars)))

    @classmethod
    def of_copies(cls, step: CapturedStep, copies: float, unread: frozenset[str] = frozenset()) -> LossMemory:
        """Return the memory of a loss that needs at its peak ``copies`` times the bytes of the outputs it reads."""
        tangents = sum(allocated(fake.nbytes, fake.device) for fake in _outputs_read(step, unread))
        more = max(0, int(copies * _output_bytes(step, unread)) - tangents)
        return cls.of_peak(step, more + SCALARS * _scalar(step), unread)

    @classmethod
    def usual(cls, step: CapturedStep, peak: int) -> LossMemory:
        """Return the assumed memory of an unknown loss: scalars if it reads no output, else `COPIES` times the outputs'
        bytes. If these exceed the share `AMPLE_SHARE` of ``peak``, the step's bytes, `FEWER` times are assumed."""
        # A scalar output is taken for a loss of the model, which needs no bytes here, unless a gradient of it
        # arrived in an earlier backward.
        unread = in_own_losses(step) - step.arrived
        if not _outputs_read(step, unread):
            return cls.of_peak(step, 0)
        ample = cls.of_copies(step, COPIES, unread)
        return ample if ample.peak <= AMPLE_SHARE * peak else cls.of_copies(step, FEWER, unread)

    @classmethod
    def measured(
        cls,
        outputs: Sequence[torch.Tensor],
        target: Any,
        loss_fn: Callable[..., torch.Tensor],
        device: torch.device,
    ) -> LossMemory:
        """Run ``loss_fn`` on random tensors like ``outputs``, and its backward if the loss needs one. Return its memory
        without the outputs' gradients; `ModelError` if it fails."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            given = tuple(_random(one, device) for one in outputs)
            learned = [one for one in given if one.requires_grad]
            try:
                peak, saved, loss = peak_and_rest_above_entry(
                    lambda: loss_fn(given[0] if len(given) == 1 else given, target), device
                )
                if not loss.requires_grad:
                    return cls(peak, saved, saved)
                back, rest, gradients = peak_and_rest_above_entry(
                    lambda: torch.autograd.grad(loss, learned, allow_unused=True), device
                )
            except Exception as error:  # any error in the user's loss is reported in one line
                reason = first_line(error)
                raise ModelError(f"the loss of a micro-batch cannot be computed: {reason}") from error
        passed = sum(allocated(g.untyped_storage().nbytes(), device) for g in gradients if g is not None)
        scalar = allocated(loss.nbytes, device)  # the gradient of the loss, which the backward begins with
        # If the forward left 100 bytes and the backward freed 60 of them and made gradients of 30, `rest` is −30, and
        # 100 − 30 − 30 = 40 stay.
        kept = saved + rest - passed + scalar
        backward = max(saved + back - passed, saved, kept)
        dense = all(
            g is not None and g.stride() == one.stride() for g, one in zip(gradients, learned, strict=True)
        )
        return cls(backward, kept, saved, max(0, peak - backward), dense)


NO_LOSS = LossMemory(0, 0, dense=True)


def _random(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like ``like``, filled with random numbers if its type is floating-point, otherwise with zeros."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    made = made.normal_() if made.is_floating_point() else made.zero_()
    return made.requires_grad_(like.requires_grad)


def _outputs_read(step: CapturedStep, unread: frozenset[str]) -> list[torch.Tensor]:
    """Return, for each output that a loss is assumed to read, a fake tensor like its gradient. Outputs in ``unread``
    or attributes are left out."""
    others = unread | step.attributes
    return [step.values[i.value].fake for i in step.inputs if i.kind == "tangent" and i.target not in others]


def _output_bytes(step: CapturedStep, unread: frozenset[str]) -> int:
    """Return the bytes of one tensor for each output that a loss is assumed to read, at 4 bytes or more an element."""
    return sum(
        allocated(fake.numel() * max(fake.itemsize, 4), fake.device) for fake in _outputs_read(step, unread)
    )


def _scalar(step: CapturedStep) -> int:
    return allocated(8, step.device)
