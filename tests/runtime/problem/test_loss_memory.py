"""The measured memory of a loss is that of micro-batches whose losses wait for their backwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from rematplan.ir import ModelError
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.problem.loss_memory import LossMemory

CPU = torch.device("cpu")
WAITING = 3
"""Micro-batches whose losses are computed before the first backward."""
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "cross entropy": lambda o, t: functional.cross_entropy(o, t.argmax(1)),
    "mse_loss": functional.mse_loss,
    "squares": lambda o, t: (o - t).square().mean(),
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "written out": lambda o, t: ((o - t) ** 2 / 2).exp().log1p().sum(1).mean(),
}


def measured_peak(loss_fn: Callable[..., torch.Tensor]) -> int:
    """The peak of the losses and backwards of all micro-batches beyond their outputs, in bytes."""
    outputs = [torch.randn(64, 128, requires_grad=True) for _ in range(WAITING)]
    target = torch.randn(64, 128)

    def run() -> None:
        losses = [loss_fn(o, target) for o in outputs]
        for o, one in zip(outputs, losses, strict=True):
            torch.autograd.grad(one, [o])

    return peak_above_entry(run, CPU)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_the_measured_memory_is_that_of_losses_that_wait(name: str) -> None:
    output, target = torch.empty(64, 128, device="meta").requires_grad_(), torch.randn(64, 128)
    found = LossMemory.measured([output], target, LOSSES[name], CPU)
    forwards = (WAITING - 1) * found.between + found.peak + found.forward
    backwards = [
        (WAITING - 1 - done) * found.between + done * found.kept + found.peak + output.nbytes
        for done in range(WAITING)
    ]
    wanted, scalars = measured_peak(LOSSES[name]), 64 * WAITING
    assert wanted <= max(forwards, *backwards) <= wanted + scalars


def test_the_scalar_of_mse_loss_keeps_a_storage_of_the_outputs_size() -> None:
    output, target = torch.empty(64, 128, device="meta").requires_grad_(), torch.randn(64, 128)
    sizes = {name: LossMemory.measured([output], target, LOSSES[name], CPU).kept for name in LOSSES}
    assert sizes["mse_loss"] > output.nbytes > 100 * sizes["cross entropy"]


def test_a_loss_without_gradients_and_a_tuple_of_outputs_are_measured() -> None:
    output = torch.empty(8, 4, device="meta")
    found = LossMemory.measured([output, output], torch.ones(8, 4), lambda o, t: (o[0] * o[1] * t).sum(), CPU)
    assert 0 < found.between <= found.kept <= found.peak


def test_a_loss_that_cannot_be_computed_is_refused_and_random_numbers_stay_as_they_were() -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(ModelError, match="loss of a micro-batch cannot be computed: The size of tensor"):
        LossMemory.measured([torch.empty(3, device="meta")], torch.ones(4), lambda o, t: (o - t).sum(), CPU)
    assert torch.equal(before, torch.random.get_rng_state())


def test_gradients_with_the_outputs_strides_need_no_copies() -> None:
    output, target = torch.empty(8, 4, device="meta").requires_grad_(), torch.ones(8, 4)
    assert LossMemory.measured([output], target, functional.mse_loss, CPU).dense
    assert not LossMemory.measured([output], target, lambda o, t: o.sum(), CPU).dense
