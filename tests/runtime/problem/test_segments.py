"""Laws of a planned backward in segments: gradients leave as they are ready, and nothing is read after it changed."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.planner.core.schedule import Run
from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")
LAYERS = 8


class Deep(nn.Module):
    """Layers of 1 MiB of weights each, with activations worth recomputing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh(), nn.GELU()) for _ in range(LAYERS))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def deep_pair(strategy: str = "approx_dp") -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(1024, 512)
    plain = copy.deepcopy(model)
    chosen = strategy if strategy == "approx_dp" else rematplan.Anneal(moves=3000)
    options = {"strategy": chosen, "costs": "roofline", "loss_memory": 0}
    planned = rematplan.plan_module(model, (x,), budget="76%", **options)
    assert planned.plan.estimate.reruns > 0
    return planned, plain, x


def test_gradients_leave_while_the_backward_runs() -> None:
    planned, _, x = deep_pair()
    seen: list[int] = []
    weights = list(planned.parameters())
    for at, p in enumerate(weights):
        p.register_post_accumulate_grad_hook(lambda _p, at=at: seen.append(at))
    x.requires_grad_().register_hook(lambda _g: seen.append(-1))
    planned(x).sum().backward()
    assert sorted(seen) == [-1, *range(LAYERS)]
    assert seen.index(LAYERS - 1) < seen.index(0)
    assert seen[-2:] == [0, -1] or seen[-2:] == [-1, 0]
    assert planned.source.count("def backward_") > LAYERS // 2


def in_backward(model: nn.Module) -> None:
    """Steps of gradient descent in the gradients' hooks, each gradient dropped at once."""

    def step(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("strategy", ["approx_dp", "anneal"])
def test_an_optimizer_in_the_backward_ends_in_equal_weights(strategy: str) -> None:
    planned, plain, x = deep_pair(strategy)
    for model in (planned, plain):
        in_backward(model)
        for _ in range(3):
            model(x).pow(2).mean().backward()
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))


def test_an_optimizer_in_the_backward_saves_the_gradients_memory() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 512)
    planned = rematplan.plan_module(Deep(), (x,), budget="100%", strategy="store_all", costs="roofline")

    def step() -> None:
        planned(x).pow(2).mean().backward()

    step()
    planned.zero_grad()
    kept = peak_above_entry(step, CPU)[0]
    planned.zero_grad()
    in_backward(planned)
    assert peak_above_entry(step, CPU)[0] < kept / 3


def test_part_of_the_gradients() -> None:
    planned, plain, x = deep_pair()
    first, *_, last = planned.parameters()
    plain_first, *_, plain_last = plain.parameters()
    expected = torch.autograd.grad(plain(x).sum(), [plain_last, plain_first])
    assert torch.equal(torch.autograd.grad(planned(x).sum(), last)[0], expected[0])
    assert torch.equal(torch.autograd.grad(planned(x).sum(), first)[0], expected[1])


class Codebook(nn.Module):
    """Uses a buffer, large and transformed, and then gives it new content, as moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("mean", torch.randn(512, 64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.sin(x * torch.sigmoid(self.mean)) @ self.weight
        self.mean.mul_(0.9).add_(x.detach(), alpha=0.1)
        return x


def test_recomputation_reads_buffers_as_they_were() -> None:
    torch.manual_seed(0)
    model, x = Codebook(), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(
        model, (x,), budget="60%", costs="roofline", strategy=rematplan.Anneal(moves=3000), loss_memory="3x"
    )
    assert re.search(r"(v_primals_\w+) = \1\.clone\(\)", planned.source)
    for one in (planned, plain):
        for _ in range(3):
            one(x).pow(2).mean().backward()
    assert torch.equal(planned.weight.grad, plain.weight.grad)
    assert torch.equal(planned.mean, plain.mean)


def test_a_frozen_statistic_changed_between_forward_and_backward_is_said() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Tanh()).eval()
    x = torch.randn(2, 3, 8, 8)
    planned = rematplan.plan_module(model, (x,), budget="100%", strategy="store_all", costs="roofline")
    loss = planned(x).sum()
    with torch.no_grad():
        model[1].running_var.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_batch_norm_runs_again_and_its_statistics_are_renewed_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Tanh(), nn.GELU()) for _ in range(6))
    )
    plain, x = copy.deepcopy(model), torch.randn(8, 8, 16, 16)
    planned = rematplan.plan_module(
        model, (x,), budget="50%", strategy=rematplan.Anneal(moves=6000), costs="roofline"
    )
    runs = [step.op for step in planned.plan.schedule if isinstance(step, Run)]
    assert any("batch_norm" in name and runs.count(name) > 1 for name in runs)
    for one in (planned, plain):
        for _ in range(2):
            one(x).pow(2).mean().backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True)
    )
    assert all(map(torch.equal, planned.state_dict().values(), plain.state_dict().values()))
