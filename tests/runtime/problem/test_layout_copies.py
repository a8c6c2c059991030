"""Laws of the room for gradients of outputs that lie otherwise in memory than the outputs do."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import InfeasibleBudget
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.problem.layout_copies import LAYOUTS, other_layouts

C, SIZE = 16, 16
LAST: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(C, 2 * C, 3, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(C, 2 * C, 2, 2),
    "gelu": nn.GELU,
    "layer norm": lambda: nn.LayerNorm(SIZE),
    "linear": lambda: nn.Linear(SIZE, 4 * SIZE),
    "pooled": lambda: nn.MaxPool2d(2),
    "shuffled": lambda: nn.PixelShuffle(2),
}
CPU = torch.device("cpu")


def network(last: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, C, 3, padding=1), nn.ReLU(), nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C), last
    )


def least(model: nn.Module, x: Tensor, **options: object) -> nn.Module:
    """Planned within the smallest budget, with no room for a loss."""
    options = {"strategy": "approx_dp", "loss_memory": 0, **options}
    with pytest.raises(InfeasibleBudget) as refused:
        rematplan.plan_module(model, (x,), budget=1000, **options)
    return rematplan.plan_module(model, (x,), budget=refused.value.smallest, **options)


@pytest.mark.parametrize(
    "form", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"]
)
@pytest.mark.parametrize("last", LAST)
def test_a_backward_is_within_the_budget_for_any_strides_of_its_gradients(
    last: str, form: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = network(LAST[last]()).to(memory_format=form)
    x = torch.randn(4, 3, SIZE, SIZE).to(memory_format=form)
    plain = copy.deepcopy(model)
    planned = least(model, x)
    for name, layout in LAYOUTS.items():
        planned.zero_grad(set_to_none=True)
        tangent = layout(planned(x).detach())
        filled = torch.randn(tangent.shape) if name != "expanded" else torch.ones(())
        tangent = filled.expand(tangent.shape) if name == "expanded" else tangent.copy_(filled)
        held = [x, tangent, *planned.parameters(), *planned.buffers()]
        for _ in range(3):
            planned.zero_grad(set_to_none=True)
            above, _ = peak_above_entry(lambda given=tangent: planned(x).backward(given), CPU)
            fixed = sum(t.untyped_storage().nbytes() for t in held)
            assert fixed + above <= planned.plan.budget, (name, fixed + above, planned.plan.budget)
        plain.zero_grad(set_to_none=True)
        plain(x).backward(tangent)
        for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, eager.grad), name


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_copies_of_a_gradient_go_with_its_last_reader(overlap: str) -> None:
    """A transposed gradient of a wide output is copied for a product; the rest of the backward has no room for it."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(48, 48), nn.GELU())]
    model, x = nn.Sequential(*layers, nn.Linear(48, 256)), torch.randn(4, 128, 48)
    planned = least(model, x, strategy=rematplan.Auto(time_limit=0.3, two_lanes=overlap))
    assert (planned.plan.lanes is not None) == (overlap == "on")
    tangent = torch.randn(4, 256, 128).transpose(1, 2)
    held = [x, tangent, *planned.parameters()]
    planned(x).backward(tangent)
    planned.zero_grad(set_to_none=True)
    above, _ = peak_above_entry(lambda: planned(x).backward(tangent), CPU)
    assert sum(t.untyped_storage().nbytes() for t in held) + above <= planned.plan.budget


def test_a_loss_inside_the_model_needs_no_reserved_memory() -> None:
    class WithLoss(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    torch.manual_seed(0)
    x = torch.randn(4, 3, SIZE, SIZE)
    planned = rematplan.plan_module(WithLoss(network(nn.GELU())), (x,), budget="100%", strategy="store_all")
    assert not list(other_layouts(planned._rematplan.last.compiled.step))
