"""Losses that keep no more bytes than their own value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from rematplan.runtime.pipeline.loss_storage import with_own_storage


def view_of_many(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum(1)[2]


@pytest.mark.parametrize("loss_fn", [functional.mse_loss, view_of_many])
def test_a_loss_gets_a_storage_of_its_own_and_the_gradient_stays(
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    output, target = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    plain, own = loss_fn(output, target), with_own_storage(loss_fn)(output, target)
    assert plain.untyped_storage().nbytes() > own.untyped_storage().nbytes() == own.nbytes
    assert torch.equal(own, plain)
    assert torch.equal(*(torch.autograd.grad(one, output)[0] for one in (own, plain)))


def test_a_loss_with_a_storage_of_its_own_is_returned_itself() -> None:
    losses = []

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses.append((output - target).square().mean())
        return losses[0]

    assert with_own_storage(mean)(torch.randn(8, requires_grad=True), torch.randn(8)) is losses[0]
