"""Laws of the backend of torch.compile for graphs with symbolic sizes: TorchDynamo compiles once, bits are those of
eager mode at each size, no peak is above the budget, and the graph is compiled again only for another plan."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import rematplan
from rematplan.compile_for_sizes import SymbolicGraph
from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")
QUICK = {"strategy": "approx_dp", "loss_memory": "4x", "costs": "roofline"}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """Masked attention over sequences with dropout, and a batch norm, whose buffers the graph changes."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        b, t, w = x.shape
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        for layer in self.layers:
            q, k, v = layer(x).view(b, t, 3, w).unbind(2)
            scores = (q @ k.transpose(1, 2) / 4).masked_fill(mask, -1e9)
            x = x + functional.dropout(scores.softmax(-1), 0.1, self.training) @ v
        y = self.norm(x.reshape(b * t, w))
        return {"y": y, "mean": x.mean(1), "length": t, "double": 2 * b}


class Layers(nn.Module):
    """Two linear layers with functions. ``broken``: TorchDynamo breaks between them, so there are two graphs."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.broken = nn.Linear(16, 16), nn.Linear(16, 16), broken

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.first(x)).sin()
        if self.broken:
            torch._dynamo.graph_break()
        y = torch.tanh(self.last(x)).cos()
        return {"y": y, "mean": y.mean(1), "length": x.shape[1], "double": 2 * x.shape[0]}


def sequences(b: int, t: int) -> Tensor:
    return torch.randn(b, t, 16)


def compiled(model: nn.Module, dynamic: bool | None = True, **options: Any) -> tuple[Any, Any, nn.Module]:
    """The compiled model, its backend, and a copy of the model."""
    backend = rematplan.backend(**{"budget": "70%", **QUICK, **options})
    return torch.compile(model, backend=backend, dynamic=dynamic), backend, copy.deepcopy(model)


def step(model: Any, x: Tensor) -> list[Any]:
    torch.manual_seed(3)
    given = x.clone().requires_grad_()
    out = model(given)
    (out["y"].pow(2).mean() + out["mean"].sin().sum()).backward()
    return [out["y"].detach(), given.grad, torch.get_rng_state(), out["length"], out["double"]]


def check_bits(ours: Any, plain: nn.Module, x: Tensor) -> None:
    for a, b in zip(step(ours, x), step(plain, x), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    pairs = [*zip(ours.parameters(), plain.parameters(), strict=True)]
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    assert all(map(torch.equal, ours.buffers(), plain.buffers()))
    for parameter in (one for pair in pairs for one in pair):
        parameter.grad = None


def check_peak(ours: Any, x: Tensor, budget: int) -> None:
    """Compare the peak of a step with the budget."""
    x.requires_grad_()
    resident = sum(t.nbytes for t in (*ours.parameters(), *ours.buffers())) + x.nbytes

    def run() -> None:
        out = ours(x)
        out["y"].pow(2).mean().backward()

    before = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    peak, _ = peak_above_entry(run, CPU)
    ours.load_state_dict({**ours.state_dict(), **before})
    assert resident + peak <= budget + 4096, (resident + peak) / budget  # small objects of the compiled code
    for parameter in ours.parameters():
        parameter.grad = None


def symbolic_graphs(monkeypatch: pytest.MonkeyPatch) -> list[SymbolicGraph]:
    """The graphs that are made from now on."""
    found: list[SymbolicGraph] = []
    make = SymbolicGraph.__init__

    def noted(self: SymbolicGraph, *args: Any) -> None:
        make(self, *args)
        found.append(self)

    monkeypatch.setattr(SymbolicGraph, "__init__", noted)
    return found


SIZES = ((8, 64), (4, 48), (7, 33), (16, 16), (2, 64), (3, 2), (8, 64))


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 3)])
def test_sizes_need_no_further_compilation(
    dynamic: bool | None, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = symbolic_graphs(monkeypatch)
    # Measured costs have the kernels' workspaces, without which a plan's peak is no bound.
    ours, backend, plain = compiled(Attention(1), dynamic, budget="90%", costs="profile")
    limit = 0
    for sizes in SIZES:
        check_bits(ours, plain, x := sequences(*sizes))
        limit = limit or backend.plans[0].budget
        check_peak(ours, x, limit)
    assert counters["stats"]["unique_graphs"] <= graphs
    assert not backend.reasons
    assert {plan.budget for plan in backend.plans} == {limit}
    assert backend.plans[0].estimate.reruns > 0
    (graph, *more) = made[-1:]
    assert not more
    assert len(graph.versions) <= 3


def test_a_larger_size_gets_the_plan_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = symbolic_graphs(monkeypatch)
    ours, backend, plain = compiled(Attention(1), budget="240KiB", costs="profile")
    for t in (10, 40, 48, 30):
        check_bits(ours, plain, x := sequences(4, t))
        check_peak(ours, x, 240 * 1024)
    assert counters["stats"]["unique_graphs"] == 1
    assert 2 <= len(made[0].versions) == len(backend.plans) <= 4
    assert backend.plans[0].estimate.reruns == 0 < backend.plans[-1].estimate.reruns


def test_known_sizes_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = symbolic_graphs(monkeypatch)
    ours, _, _ = compiled(Layers(), budget="100%")
    for t in (12, 8, 12, 8, 10):
        step(ours, sequences(4, t))
    assert len(made[0].of_sizes) == 3
    monkeypatch.setattr(SymbolicGraph, "_version", None)
    step(ours, sequences(4, 8))


def test_sizes_zero_one_and_two() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())
    ours, _, plain = compiled(model, budget="100%", on_infeasible="eager")
    for rows in (5, 1, 2, 0, 1, 16, 32):
        x = torch.randn(rows, 16)
        for one in (ours, plain):
            one.zero_grad()
            one(x).sum().backward()
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True)
        )
    assert counters["stats"]["unique_graphs"] == 3  # one for 0, one for 1, one for all others


def test_without_gradients_nothing_is_planned() -> None:
    ours, backend, plain = compiled(Attention(1), budget="1GiB")
    ours.eval()
    plain.eval()
    with torch.no_grad():
        for t in (5, 7, 9):
            x = sequences(3, t)
            assert torch.equal(ours(x)["y"], plain(x)["y"])
    assert backend.plans == []
    ours.train()
    plain.train()
    for t in (5, 7, 9):
        check_bits(ours, plain, sequences(3, t))
    assert counters["stats"]["unique_graphs"] == 2


def test_each_graph_after_a_break_has_one_family() -> None:
    ours, backend, plain = compiled(Layers(broken=True), budget="100%")
    for sizes in ((4, 9), (5, 7), (2, 3), (6, 12)):
        check_bits(ours, plain, sequences(*sizes))
    assert counters["stats"]["unique_graphs"] == 2
    assert len({plan.problem for plan in backend.plans}) == 2


class Of(nn.Module):
    """A forward as a function of a weight and an input."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(16)), forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self.w, x)


FORWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a root": lambda w, x: x * w / math.sqrt(x.shape[1]),
    "a branch": lambda w, x: (x * w).relu() if x.shape[1] > 5 else (x * w).tanh(),
    "a loop": lambda w, x: sum((x[:, t] * w).tanh() for t in range(x.shape[1])),
    "a fraction": lambda w, x: (x * w)[:, : int(x.shape[1] * 0.5 + 1)].sin(),
    "padded": lambda w, x: functional.pad(x * w, (0, 0, 0, -x.shape[1] % 4)).sin(),
    "the last ones": lambda w, x: (x * w).exp()[:, -2:].sin(),
    "in place": lambda w, x: (x * w).add_(x).mul_(2).relu_(),
    "all pairs": lambda w, x: (x @ x.transpose(1, 2)).softmax(-1) @ (x * w),
}
FIXED = {"a root", "a loop", "a fraction"}
"""Those for which a size must be known."""


@pytest.mark.parametrize("name", FORWARDS)
def test_each_size_follows_eager_mode(name: str) -> None:
    ours, _, plain = compiled(Of(FORWARDS[name]), budget="100%", on_infeasible="eager")
    for sizes in ((3, 8), (4, 6), (2, 4), (6, 6), (3, 8)):
        x = sequences(*sizes)
        found = []
        for one in (ours, plain):
            one.zero_grad()
            y = one(x)
            y.sum().backward()
            found.append((y.detach(), *(p.grad for p in one.parameters())))
        assert all(map(torch.equal, *found))
    if name not in FIXED:
        assert counters["stats"]["unique_graphs"] <= 1 + (name == "a branch")


def test_parts_of_larger_tensors() -> None:
    ours, backend, plain = compiled(Layers(), budget="100%")
    data = torch.randn(40, 12, 16)
    for rows in (slice(0, 3), slice(10, 15), slice(30, 37)):
        check_bits(ours, plain, data[rows])
    assert backend.plans


def test_a_size_that_fits_no_plan_is_said_once() -> None:
    ours, backend, plain = compiled(Attention(1), budget="280KiB")
    for t, warned in ((12, 0), (64, 1), (64, 0), (12, 0)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            check_bits(ours, plain, sequences(4, t))
        assert len([one for one in said if "smallest found" in str(one.message)]) == warned
    assert backend.plans[0].peak <= 280 * 1024 < backend.plans[-1].peak


def test_one_argument_may_be_a_size() -> None:
    def forward(x: Tensor, n: int, w: Tensor) -> Tensor:
        return (x * w).sin()[:, :n].exp().sum() * n

    w, backend = torch.randn(16, requires_grad=True), rematplan.backend(budget="100%", **QUICK)
    ours = torch.compile(forward, backend=backend, dynamic=True)
    for sizes, n in (((3, 8), 4), ((4, 9), 5), ((2, 7), 6), ((3, 8), 7)):
        x = sequences(*sizes)
        (a,), (b,) = (torch.autograd.grad(one(x, n, w), w) for one in (ours, forward))
        assert torch.equal(a, b)
    assert counters["stats"]["unique_graphs"] == 1


def test_inductor_compiles_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = symbolic_graphs(monkeypatch)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Softmax(-1)) for _ in range(3)))
    ours, backend, plain = compiled(model, compiler="inductor", budget="90%")
    for rows in (512, 300, 2, 700, 512):
        x, found = torch.randn(rows, 16), []
        for one in (ours, plain):
            one.zero_grad()
            one(x).pow(2).sum().backward()
            found.append([p.grad for p in one.parameters()])
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*found, strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert not backend.reasons
    assert len(made[0].versions) == len(backend.plans) <= 3


def test_a_backend_that_is_not_dynamic_refuses_symbolic_sizes() -> None:
    backend = rematplan.backend(budget="100%", dynamic_shapes=False, **QUICK)
    plain = Layers()
    ours = torch.compile(copy.deepcopy(plain), backend=backend)
    check_bits(ours, plain, sequences(4, 16))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="dynamic_shapes=False"):
        ours(sequences(4, 12))


def test_numbers_computed_from_fixed_sizes_are_refused() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            picked = super().forward(x).view(-1)[torch.arange(5) if x.shape[0] > 3 else torch.arange(3)]
            return picked * len(range(x.shape[0])), 2 * x.shape[1]

    ours = torch.compile(Named(4, 4), backend=rematplan.backend(budget="100%", **QUICK), dynamic=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="compile it with"):
        ours(torch.randn(6, 3, 4))
