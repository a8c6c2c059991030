"""The bytes that a plan reserves for a loss outside of the planned module: those at the loss's peak, those between the
loss and its backward, and those that stay allocated until the step ends."""

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
    """Bytes that a loss outside of the model needs in addition to the outputs and their gradients.

    ``peak``: the bytes at the loss's peak. ``kept``: the bytes that stay allocated until the step ends, because the
    caller keeps the loss and its gradient while the backward runs. (The scalar that `mse_loss` or `smooth_l1_loss`
    returns keeps a storage of the outputs' size alive.) ``peak`` includes ``kept``, unless ``peak`` is too small for
    that. ``saved``: the bytes that are allocated between the computation of the loss and its backward, if other
    micro-batches run in between; None: not known, so ``peak`` is assumed. ``forward``: bytes by which the loss exceeds
    ``peak`` while it is computed, before its backward. Only `measured` tells the two apart. ``dense``: whether the
    gradients of the outputs are known to have the outputs' strides, so that the backward need not copy them.
    """

    peak: int
    kept: int
    saved: int | None = None
    forward: int = 0
    dense: bool = False

    @property
    def between(self) -> int:
        """The bytes that are allocated between the computation of the loss and its backward."""
        return self.peak if self.saved is None else self.saved

    @classmethod
    def of_peak(cls, step: CapturedStep, peak: int, unread: frozenset[str] = frozenset()) -> LossMemory:
        """Return the memory of a loss whose peak is known.

        The scalar loss, its gradient, and one tensor of the size of each output that the loss reads are assumed to stay
        allocated until the step ends, as far as ``peak`` has bytes for them. The two scalars are counted even if it has
        not.
        """
        scalars = 2 * _scalar(step)
        return cls(peak, max(scalars, min(peak, _output_bytes(step, unread) + scalars)))

    @classmethod
    def of_copies(cls, step: CapturedStep, copies: float, unread: frozenset[str] = frozenset()) -> LossMemory:
        """Return the memory of a loss that needs, at its peak, ``copies`` times the bytes of the outputs that
        it reads.
        """
        tangents = sum(allocated(fake.nbytes, fake.device) for fake in _outputs_read(step, unread))
        more = max(0, int(copies * _output_bytes(step, unread)) - tangents)
        return cls.of_peak(step, more + SCALARS * _scalar(step), unread)

    @classmethod
    def usual(cls, step: CapturedStep, peak: int) -> LossMemory:
        """Return the assumed memory of an unknown loss: `COPIES` times the bytes of the outputs, or `FEWER` times if
        the outputs are large in comparison to the step.

        A scalar output is assumed to be a loss that the model computes. Such an output, and the outputs from which it
        is computed, need no bytes here. The exception are outputs whose gradient arrived in an earlier backward
        (`CapturedStep.arrived`). The other outputs are assumed to have a loss outside of the model.
        """
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
        """Run a loss and its backward once on random outputs, and return the memory that it needs.

        The result does not include the gradients of the outputs.
        """
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
        kept = saved + rest - passed + scalar
        backward = max(saved + back - passed, saved, kept)
        dense = all(
            g is not None and g.stride() == one.stride() for g, one in zip(gradients, learned, strict=True)
        )
        return cls(backward, kept, saved, max(0, peak - backward), dense)


NO_LOSS = LossMemory(0, 0)


def _random(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with the shape, strides, type and ``requires_grad`` of the tensor ``like``, filled with random
    numbers if its type is real, otherwise with zeros."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    made = made.normal_() if made.is_floating_point() else made.zero_()
    return made.requires_grad_(like.requires_grad)


def _outputs_read(step: CapturedStep, unread: frozenset[str]) -> list[torch.Tensor]:
    """Return, for each output that a loss is assumed to read, a fake tensor like the output's gradient.

    ``unread``: positions (as text) of outputs that the loss does not read. Outputs that the forward assigns to
    attributes (a normalised weight, for example) are excluded, too: a loss seldom reads them.
    """
    others = unread | step.attributes
    return [step.values[i.value].fake for i in step.inputs if i.kind == "tangent" and i.target not in others]


def _output_bytes(step: CapturedStep, unread: frozenset[str] = frozenset()) -> int:
    """Return the bytes of one tensor for each output that a loss is assumed to read, with at least 4 bytes per element.

    ``unread``: positions (as text) of outputs that the loss does not read.
    """
    return sum(
        allocated(fake.numel() * max(fake.itemsize, 4), fake.device) for fake in _outputs_read(step, unread)
    )


def _scalar(step: CapturedStep) -> int:
    return allocated(8, step.device)
