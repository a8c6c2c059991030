"""Laws of the backend of torch.compile: the same bits as eager mode, the plan's own graphs, errors that say what."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.compile_backend import _Partitioner
from rematplan.ir import InfeasibleBudget, TrainingGraph, UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.plan import Plan
from rematplan.runtime.costs.measure import peak_above_entry


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Dropout, also of what nothing reads, batch norm, tied weights; outputs that are views and numbers."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(depth)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = functional.dropout(torch.tanh(layer(x)), 0.2, self.training)
        functional.dropout(x, 0.1, self.training)
        y = self.last(torch.tanh(self.norm(self.first(x))))
        return {"y": functional.dropout(y, 0.5, self.training), "view": x[:, :2], "n": 3}


def compiled_and_plain(
    depth: int = 3, dynamic: bool | None = None, **options: Any
) -> tuple[Any, nn.Module, Any, nn.Module]:
    torch.manual_seed(0)
    model = Net(depth)
    plain = copy.deepcopy(model)
    backend = rematplan.backend(**{"budget": "75%", "strategy": "approx_dp", "costs": "roofline"} | options)
    return torch.compile(model, backend=backend, dynamic=dynamic), model, backend, plain


def loss_of(out: dict[str, Any]) -> Tensor:
    return out["y"].pow(2).mean() + out["view"].sin().sum() * out["n"]


def steps(model: Any, x: Tensor, n: int = 3) -> list[Tensor]:
    torch.manual_seed(3)
    found = []
    for _ in range(n):
        given = x.clone().requires_grad_()
        loss = loss_of(model(given))
        loss.backward()
        found += [loss.detach(), given.grad]
    return [*found, torch.get_rng_state()]


def test_bits_are_those_of_eager_mode() -> None:
    compiled, model, backend, plain = compiled_and_plain()
    x = torch.randn(512, 64)
    assert all(map(torch.equal, steps(compiled, x), steps(plain, x)))
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    (plan,) = backend.plans
    assert plan.estimate.reruns > 0
    assert plan.estimate.peak <= plan.budget


class Sized(Net):
    """Gives a size beside its tensors."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = super().forward(x)
        return {**out, "view": out["view"].reshape(x.shape[0] * 2), "n": x.shape[0]}


def test_without_symbolic_sizes_each_size_is_compiled() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Sized()
    plain = copy.deepcopy(model)
    backend = rematplan.backend(budget="90%", strategy="approx_dp", costs="roofline")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for n in (512, 300, 400, 512):
        x = torch.randn(n, 64)
        assert all(map(torch.equal, steps(compiled, x, 1), steps(plain, x, 1)))
    assert [plan.estimate.reruns > 0 for plan in backend.plans] == [True, False, False]
    assert len({plan.budget for plan in backend.plans}) == 1


def test_inductor_gets_the_same_plan() -> None:
    compiled, model, backend, plain = compiled_and_plain(2, compiler="inductor", budget="93%")
    model.eval()  # Inductor draws other random numbers than eager mode
    plain.eval()
    x = torch.randn(512, 64)
    for a, b in zip(steps(compiled, x), steps(plain, x), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5) if a.is_floating_point() else torch.equal(a, b)
    (plan,) = backend.plans
    assert plan.estimate.reruns > 0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-4)


def compiled_peak(model: nn.Module, x: Tensor, **options: Any) -> tuple[int, Any]:
    """The measured peak of a step that Inductor compiled, with all that exists before it, and the backend."""
    backend = rematplan.backend(compiler="inductor", **options)
    compiled = torch.compile(model, backend=backend)
    tangent = torch.ones_like(model(x))
    compiled(x).backward(tangent)
    model.zero_grad(set_to_none=True)
    resident = sum(p.nbytes for p in model.parameters()) + x.nbytes + tangent.nbytes
    peak, _ = peak_above_entry(lambda: compiled(x).backward(tangent), torch.device("cpu"))
    return resident + peak, backend


def test_inductors_code_of_convolutions_keeps_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
            for _ in range(3)
        )
    )
    peak, backend = compiled_peak(model, torch.randn(8, 32, 32, 32), budget="85%", strategy="approx_dp")
    (limit,) = backend.planner.fixed.values()
    assert peak <= limit
    assert backend.plans[0].estimate.reruns > 0


def test_what_inductor_fuses_is_not_recomputed_for_the_budget() -> None:
    class Classes(nn.Module):
        """Eager mode holds the logarithms of probabilities and their gradients at once; Inductor fuses both."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
            self.head = nn.Linear(64, 256)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.head(self.body(x))
            return functional.cross_entropy(scores, torch.arange(len(x)) % 256)

    torch.manual_seed(0)
    model, x = Classes(), torch.randn(512, 64)
    options: dict[str, Any] = {"costs": "roofline", "strategy": rematplan.Anneal(moves=3000)}
    peak, backend = compiled_peak(model, x, budget="75%", **options)
    (limit,) = backend.planner.fixed.values()
    assert peak <= limit < backend.plans[0].peak


def test_inductor_may_have_nothing_to_run() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self) -> Tensor:
            return self.weight.view(2, 12)

    model = View()
    torch.compile(model, backend=rematplan.backend(budget="100%", compiler="inductor"))().sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(4, 6))


def test_the_key_of_inductors_cache_has_no_plan_in_it() -> None:
    assert pickle.loads(pickle.dumps(_Partitioner(lambda: None))) == "rematplan"


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UsageError, match="unknown compiler"):
        rematplan.backend(budget="1GiB", compiler="gcc")
    with pytest.raises(UsageError, match="not understood"):
        rematplan.backend(budget="lots")
    compiled, *_ = compiled_and_plain(budget=1000)
    with pytest.raises(Exception, match="smallest found") as caught:
        compiled(torch.randn(8, 64))
    assert isinstance(caught.value.inner_exception, InfeasibleBudget)


def several_sizes(sizes: range, **options: Any) -> Any:
    """The backend of a network that was called with these numbers of rows, and compiled for each."""
    compiled, _, backend, _ = compiled_and_plain(dynamic=False, **options)
    for n in sizes:
        loss_of(compiled(torch.randn(8 * n, 64))).backward()
    return backend


def test_where_the_compiler_would_drop_plans_a_warning_names_the_setting() -> None:
    with torch._dynamo.config.patch(recompile_limit=3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            few = several_sizes(range(1, 3), depth=1, budget="1GiB")
        assert not [one for one in said if "recompile_limit" in str(one.message)]
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="rematplan: .*WITHOUT A PLAN") as warned:
            many = several_sizes(range(1, 5), depth=1, budget="1GiB")
    (limit,) = [str(one.message) for one in warned if "WITHOUT A PLAN" in str(one.message)]
    assert "torch._dynamo.config.recompile_limit, 3" in limit
    assert (len(few.plans), len(many.plans)) == (2, 3)  # the compiler has dropped one


def test_a_plan_for_another_size_begins_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    met, search = [], Auto.plan

    def seen(self: Auto, graph: TrainingGraph, budget: int, progress: Any, starts: Any) -> Plan:
        met.append((self.time_limit, [p.estimate.peak <= budget for p in starts]))
        return search(self, graph, budget, progress, starts)

    monkeypatch.setattr(Auto, "plan", seen)
    several_sizes(range(64, 66), budget="95%", strategy=Auto(time_limit=1.0, reuse=False))
    assert [limit for limit, _ in met] == [1.0, 0.25]
    assert met[0][1] == []
    assert True in met[1][1]


def test_a_larger_size_that_fits_no_plan_goes_on_with_the_leanest() -> None:
    first = several_sizes(range(64, 65)).plans[0].budget
    torch._dynamo.reset()
    compiled, model, backend, plain = compiled_and_plain(budget=first)
    for n in (512, 6400):
        x = torch.randn(n, 64)
        for one, called in ((model, compiled), (plain, plain)):
            torch.manual_seed(0)
            one.zero_grad()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                loss_of(called(x)).backward()
            messages = [str(w.message) for w in said if "plan of the smallest found peak" in str(w.message)]
            assert len(messages) == (n == 6400 and called is compiled)
        for ours, eager in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, eager.grad)
    assert backend.plans[0].peak <= first < backend.plans[1].peak


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_first_plan_is_refused_also_after_a_validation_and_again(dynamic: bool) -> None:
    _, model, backend, _ = compiled_and_plain(1, budget=1000)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    x = torch.randn(8, 64)
    with torch.no_grad():
        compiled(x)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="InfeasibleBudget"):
            compiled(x)
    assert backend.plans == []


def test_what_others_hold_counts_for_compiled_graphs_too() -> None:
    alone, more = (several_sizes(range(8, 9), depth=1, budget="100%", reserved=r) for r in ([], ["1MiB"]))
    assert more.plans[0].peak == alone.plans[0].peak + 2**20
