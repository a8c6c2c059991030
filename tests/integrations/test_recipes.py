"""The recipes of one line for accelerate, timm and torchvision train with the same bits as without it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan

in_place = partial(
    rematplan.apply, budget="85% of activations", strategy="approx_dp", costs="roofline", refine=False
)
STEPS = 5


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def images(at: int) -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(at))


def trained(model: nn.Module, average: Any) -> list[Tensor]:
    """Train a network and an average of its weights, and return the losses and both states."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    update = average.update if hasattr(average, "update") else average.update_parameters
    losses = []
    for at in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images(at)), torch.tensor([0, 1]))
        loss.backward()
        optimizer.step()
        update(model)
        losses.append(loss.detach())
    copied = average.module.eval()
    return [*losses, *model.state_dict().values(), *copied.state_dict().values(), copied(images(0)).detach()]


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def run(prepared: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of other tests
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        net: nn.Module = nn.Sequential(*layers)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(prepared(net), optimizer)
        for at in range(20):
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(at))
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if prepared is accumulating:
            assert rematplan.planning(model).plans
        return list(accelerator.unwrap_model(model, keep_fp32_wrapper=False).state_dict().values())

    accumulating = partial(in_place, reserved=["gradients"], budget="90%")
    assert same(run(accumulating), run(as_it_is))


def test_timm() -> None:
    timm = pytest.importorskip("timm")

    def run(prepared: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = prepared(timm.create_model("test_resnet", num_classes=4))
        return trained(model, timm.utils.ModelEmaV3(model, decay=0.5))

    assert same(run(in_place), run(as_it_is))


def test_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")

    def run(prepared: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = prepared(torchvision.models.get_model("squeezenet1_1", num_classes=4))
        return trained(model, torch.optim.swa_utils.AveragedModel(model))

    assert same(run(in_place), run(as_it_is))
