"""Laws of a planned module on every device that this machine has: the same bits, and a peak within the budget."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import rematplan
from rematplan.models import build, example_inputs
from rematplan.runtime.measure import peak_above_entry

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NETWORKS = {
    "resnet18": ({"image": 64, "width": 16, "classes": 10}, 16, "82%"),
    "unet": ({"image": 64, "width": 8}, 2, "80%"),
    "gpt12": ({"depth": 3, "width": 64, "tokens": 128, "vocabulary": 100}, 8, "80%"),
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels whose bits do not depend on the order of threads, where the device has them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def made(name: str, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], str]:
    sizes, batch, budget = NETWORKS[name]
    torch.manual_seed(0)
    model = build(name, **sizes).to(device)
    inputs = example_inputs(name, batch=batch, **sizes)
    return model, tuple(x.to(device) for x in inputs), budget


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_bits_and_peak(name: str, device: str) -> None:
    model, inputs, budget = made(name, device)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(model, inputs, budget=budget, strategy="approx_dp")
    assert planned.plan.estimate.reruns > 0
    tangent = torch.ones_like(plain(*inputs).detach())
    plain.load_state_dict(planned.state_dict())  # the forward updated running statistics
    for one in (planned, plain):
        torch.manual_seed(1)
        one(*inputs).backward(tangent)
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    planned.zero_grad(set_to_none=True)
    held = sum(t.nbytes for t in (*planned.parameters(), *planned.buffers(), *inputs, tangent))
    peak, _ = peak_above_entry(lambda: planned(*inputs).backward(tangent), torch.device(device))
    assert held + peak <= planned.plan.budget
