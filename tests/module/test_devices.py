"""Laws of a planned module on every device that this machine has: the same bits, and a peak within the budget."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.models import build, example_inputs
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry, release_libraries
from rematplan.runtime.costs.profile import profile_costs

pytestmark = pytest.mark.usefixtures("few_blocks")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NETWORKS = {
    "resnet18": ({"image": 64, "width": 16, "classes": 10}, 16),
    "unet": ({"image": 64, "width": 8}, 2),
    "gpt12": ({"depth": 2, "width": 64, "tokens": 128, "vocabulary": 100}, 8),
}
"""Of each network: its sizes, and the rows of a batch."""


@pytest.fixture(autouse=True)
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels whose bits do not depend on the order of threads, where the device has them. Those of attention have to
    be told that nothing else will do."""
    before = torch.are_deterministic_algorithms_enabled()
    attends = request.node.name.startswith(("test_attention", "test_bits_and_peak[gpt12"))
    torch.use_deterministic_algorithms(True, warn_only=not attends)
    yield
    torch.use_deterministic_algorithms(before)


def made(name: str, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes, batch = NETWORKS[name]
    torch.manual_seed(0)
    model = build(name, **sizes).to(device)
    inputs = example_inputs(name, batch=batch, **sizes)
    return model, tuple(x.to(device) for x in inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_bits_and_peak(name: str, device: str) -> None:
    model, inputs = made(name, device)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(model, inputs, budget="min", strategy="approx_dp")
    assert planned.plan.estimate.reruns > 0
    tangent = torch.ones_like(plain(*inputs).detach())
    plain.load_state_dict(planned.state_dict())  # the forward updated running statistics
    for one in (planned, plain):
        torch.manual_seed(1)
        one(*inputs).backward(tangent)
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    assert all(map(torch.equal, planned.buffers(), plain.buffers()))
    planned.zero_grad(set_to_none=True)
    resident = sum(t.nbytes for t in (*planned.parameters(), *planned.buffers(), *inputs, tangent))
    release_libraries(tangent.device)  # so that what they take again counts
    peak, _ = peak_above_entry(lambda: planned(*inputs).backward(tangent), tangent.device)
    assert resident + peak <= planned.plan.budget


class Drawing(nn.Module):
    """Attention that drops out, dropouts around it; blocks that are worth running again."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(64, 192) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for into, out in zip(self.into, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in into(x).chunk(3, -1))
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            x = x + functional.dropout(out(y.transpose(1, 2).flatten(2)).relu(), 0.3)
        return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_attention_draws_the_same_numbers_again(overlap: str, device: str) -> None:
    torch.manual_seed(0)
    model, x = Drawing().to(device), torch.randn(4, 128, 64, device=device)
    planned = rematplan.plan_module(model, (x,), budget="min", strategy=rematplan.ChenSqrt(two_lanes=overlap))
    assert planned.plan.estimate.reruns > 0
    found = []
    for one in (copy.deepcopy(model), planned):
        torch.manual_seed(1)
        one.zero_grad(set_to_none=True)
        one(x).square().sum().backward()
        drawn_next = torch.rand(4, device=device)
        found.append([*(p.grad for p in one.parameters()), drawn_next])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("device", DEVICES)
def test_costs_are_the_device_s(device: str, tmp_path: Path) -> None:
    large_size = 1024 if device == "cpu" else 4096  # a kernel much longer than its launch

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = (nn.Parameter(torch.randn(n, n)) for n in (32, large_size))

        def forward(self, x: Tensor) -> Tensor:
            return (x[:32, :32] @ self.small).sum() + (x @ self.large).sum()

    model, x = Products().to(device), torch.randn(large_size, large_size, device=device)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    step = capture(model, (x,), "products")
    costs = profile_costs(step, cache=tmp_path)
    after = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    assert torch.equal(state, after)
    small, large = (
        costs[c.name] for c in step.calls if c.target is torch.ops.aten.mm.default and not c.backward
    )
    assert 0 < small.time < large.time
    assert (large.library > 0) == (device == "cuda")
    assert profile_costs(step, cache=tmp_path) == costs  # kept


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_that_moves_is_planned_where_it_is(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    planned = rematplan.plan_module(model, (torch.randn(8, 16),), budget="1GiB", strategy="store_all")
    for place in (device, "cpu"):
        plain, x = copy.deepcopy(model).to(place), torch.randn(8, 16, device=place)
        planned.to(place).zero_grad(set_to_none=True)
        planned(x).sum().backward()
        plain(x).sum().backward()
        pairs = zip(planned.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) and p.grad.device.type == place for p, q in pairs)
        assert all(map(torch.equal, planned.buffers(), plain.buffers()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_is_planned(kind: type[nn.RNNBase], device: str) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(8, 16, num_layers=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[0][-1]

    torch.manual_seed(0)
    model, x = Last().to(device), torch.randn(5, 3, 8, device=device)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(model, (x,), budget="min", strategy="chen_sqrt")
    with torch.backends.cudnn.flags(allow_tf32=False):  # as PyTorch's own products
        for one in (planned, plain):
            one(x).square().sum().backward()
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    for p, q in pairs:  # on CUDA by PyTorch's own cells, not cuDNN's
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loaded_step_runs_there(device: str) -> None:
    sizes = rematplan.Sizes(batch=4, image=32, width=8, classes=5)
    loaded = rematplan.load_step("resnet18", sizes=sizes, device=device)
    assert loaded.step.device.type == device
    graph = rematplan.problem(loaded, "profile")
    plan = rematplan.plan(graph, rematplan.no_recompute(graph).estimate.peak, "chen_sqrt")
    report = rematplan.run_step(loaded, plan, steps=1, check=True)
    assert report.verification.bit_equal, report.verification
    assert report.measured_peak <= plan.estimate.peak


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_model_follows_its_plan_there(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Dropout(0.3), nn.Linear(128, 8)).to(device)
    plain, x = copy.deepcopy(model), torch.randn(16, 32, device=device)
    backend = rematplan.backend(budget="min", strategy="chen_sqrt")
    compiled = torch.compile(model, backend=backend)
    for one in (compiled, plain):
        torch.manual_seed(1)
        one(x).square().sum().backward()
    assert backend.plans
    assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in plain.parameters())))
