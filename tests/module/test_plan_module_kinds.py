"""Laws of the drop-in for many kinds of modules: attributes that a forward sets, draws that nothing reads, recurrent
layers, layers under several names, other layouts; and those of which no plan can be made."""

import copy
from collections.abc import Callable

import pytest
import torch
from same_bits import same, same_grads
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError


class Odd(nn.Module):
    """Two views of a plain tensor attribute, a buffer that is assigned, one updated in place by what is long to
    compute, a range of a profile, and attributes that the forward leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.scale = torch.linspace(0.5, 1.5, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.tensor(0))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        with torch.profiler.record_function("body"):
            self.last = self.body(x * self.scale[None])
        self.seen.append(self.last)
        return self.last * self.mean + self.scale[None]


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_odd_modules_are_planned_and_left_as_they_were(budget: str) -> None:
    torch.manual_seed(0)
    model = Odd()
    plain = copy.deepcopy(model)
    x = torch.randn(32, 16)
    planned = rematplan.plan_module(
        model, (x,), budget=budget, costs="roofline", strategy=rematplan.Auto(time_limit=0.1)
    )
    assert not hasattr(planned, "last")
    assert planned.seen == []
    for _ in range(2):
        for one in (planned, plain):
            one.zero_grad()
            one(x).pow(2).sum().backward()
    assert torch.equal(planned.last, plain.last)
    assert len(planned.seen) == 2
    assert all(map(torch.equal, planned.seen, plain.seen))
    assert same_grads(planned, plain)
    assert same(planned, plain)


class Unread(nn.Linear):
    """Draws random numbers that nothing depends on."""

    def forward(self, x: Tensor) -> Tensor:
        nn.functional.dropout(super().forward(x))
        torch.rand(3)
        return nn.functional.dropout(super().forward(x))


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_what_is_drawn_for_nothing_is_drawn(budget: str) -> None:
    model, x = Unread(16, 16), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(model, (x,), budget=budget, strategy="approx_dp", costs="roofline")
    states = []
    for one in (planned, plain):
        torch.manual_seed(3)
        one(x).pow(2).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert same_grads(planned, plain)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_the_kernels_that_eager_mode_runs(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), kind(8, 8, 2, dropout=0.2, bidirectional=True))
    plain, x = copy.deepcopy(model), torch.randint(0, 11, (3, 3))
    planned = rematplan.plan_module(model, (x,), budget="min", strategy="approx_dp", costs="roofline")
    for one in (planned, plain):
        torch.manual_seed(3)
        one(x)[0].pow(2).sum().backward()
    assert same_grads(planned, plain)


class Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (2 if y.sum() > 0 else 3)


class Slotted(nn.Linear):
    __slots__ = ("more",)


def refused(*_: object) -> object:
    raise AssertionError("it was compiled")


class CompiledInPlace(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.compile(backend=refused)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_no_plan_can_be_made_of_is_said() -> None:
    for model, batch, why in (
        (Looks(2, 2), torch.ones(2, 2), "reads values of tensors"),
        (nn.Embedding(5, 2, sparse=True), torch.zeros(2, dtype=torch.int64), "layout torch.sparse_coo"),
    ):
        with pytest.warns(UserWarning, match=f"{why}.*: it runs in eager mode"):
            rematplan.plan_module(model, (batch,), budget="100%", costs="roofline")
    for model, batch, why in (
        (nn.LazyLinear(2), torch.ones(2, 2), "not known yet"),
        (
            nn.Sequential(torch.compile(Looks(2, 2))),
            torch.ones(2, 2),
            "nor in parts: 0 is compiled; plan the",
        ),
        (CompiledInPlace(2, 2), torch.ones(2, 2), "compiled in place, and its calls would not reach a plan"),
        (nn.Sequential(torch.jit.script(nn.Linear(2, 2))), torch.ones(2, 2), "is scripted"),
        (Slotted(2, 2), torch.ones(2, 2), "allows no planned subclass"),
    ):
        with pytest.raises(ModelError, match=why):
            rematplan.plan_module(model, (batch,), budget="100%", costs="roofline")


@pytest.mark.parametrize(
    "model",
    [
        lambda: torch.compile(nn.Linear(8, 8), backend=refused),
        lambda: nn.Sequential(torch.compile(nn.Linear(8, 8), backend=refused), nn.GELU()),
        lambda: nn.Sequential(CompiledInPlace(8, 8), nn.GELU()),
    ],
    ids=["whole", "inside", "in_place"],
)
def test_compiled_modules_are_planned_as_in_eager_mode(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x, compiled = torch.randn(4, 8), model()
    with pytest.warns(UserWarning, match="planned calls do not use what torch.compile made"):
        planned = rematplan.plan_module(compiled, (x,), budget="100%", costs="roofline")
    planned(x).sum().backward()
    with torch.compiler.set_stance("force_eager"):
        plain = copy.deepcopy(compiled)
        plain.zero_grad()
        plain(x).sum().backward()
    assert same_grads(planned, plain)


class Shared(nn.Module):
    """One layer under four names, one of them in a list; a batch norm under two; a weight tied to another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([self.first, self.norm, nn.Linear(8, 8), self.first])
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.norm, self.second, *self.layers, self.tied):
            x = torch.tanh(layer(x)) + x
        return x


def test_modules_with_several_names_are_unchanged() -> None:
    torch.manual_seed(0)
    model = Shared()
    plain = copy.deepcopy(model)
    before = [*model.parameters(), *model.buffers()]
    x = torch.randn(6, 8)
    one = rematplan.plan_module(model, (x,), budget="80%", strategy="approx_dp", costs="roofline")
    assert [id(t) for t in before] == [id(t) for t in (*one.parameters(), *one.buffers())]
    assert one.plan.estimate.reruns > 0
    for net in (plain, one):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            optimizer.step()
    assert same(one, plain)
