"""ATen ops whose results' shapes depend on values, as ops that are told the shape: a tracer has no values."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("rematplan::ctc_loss", mutates_args=())
def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    longest: int,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, and the table of alphas for the backward. ``longest``: the greatest of ``target_lengths``."""
    del longest
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    return results


@_ctc_loss.register_fake
def _(
    log_probs: torch.Tensor,
    _targets: Any,
    _input_lengths: Any,
    _target_lengths: Any,
    longest: int,
    *_options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, 2 * longest + 1))


CTC_LOSS = torch.ops.rematplan.ctc_loss.default
