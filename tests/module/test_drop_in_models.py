"""Laws of models with ways of their own, planned: checkpoints inside, one tensor for two inputs, names that are ours
too, tensors that the forward writes or assigns."""

import copy
import math
from typing import Any, ClassVar

import pytest
import torch
from same_bits import X, equal_after, planned_and_plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematplan
from rematplan.ir import UsageError
from rematplan.planner.core.schedule import Run


def step(model: nn.Module) -> None:
    model(X).pow(2).sum().backward()


class Product(nn.Module):
    """Two inputs, which may be one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.mix(a, b, b)[0] * b


def test_an_input_given_twice_is_one_tensor() -> None:
    x = X.reshape(1, 8, 16).clone().requires_grad_()
    planned, plain = planned_and_plain(Product(), x, x)
    equal_after(lambda m: m(x, x).pow(2).sum().backward(), planned, plain)
    equal_after(lambda m: m(x, x.detach()).pow(2).sum().backward(), planned, plain)


class Neighbours(nn.Linear):
    """Sums over the edges of a graph, whose weights are the values of a sparse matrix."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__(16, 16)
        graph = torch.eye(8).roll(1, 0).to_sparse_coo().coalesce()
        self.edges = graph.indices()
        self.register_buffer("weights", graph.values())

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        of, to = self.edges
        y = super().forward(x)[of] * (self.weights * weights)[:, None]
        return torch.zeros_like(y).index_add(0, to, y).tanh()


def test_values_of_a_sparse_matrix_are_dense_tensors() -> None:
    model, weights = Neighbours(), (2 * torch.eye(8)).to_sparse_coo().coalesce().values()
    planned = rematplan.plan_module(model, (X, weights), budget="min", strategy="approx_dp", costs="roofline")
    plain = copy.deepcopy(model)
    equal_after(lambda m: m(X, weights).pow(2).sum().backward(), planned, plain)


class Charged(nn.Module):
    """Has a loss of its own that begins with a buffer, which the forward has take gradients (as vector quantizers do),
    and a buffer that takes them anyway."""

    scale: Tensor
    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 2.0, requires_grad=True))
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.line(x) * self.scale
        return y, self.zero.requires_grad_() + y.mean()


def test_buffers_may_take_gradients() -> None:
    planned, plain = planned_and_plain(Charged())
    for model in (planned, plain):
        for _ in range(2):
            y, loss = model(X)
            (y.pow(2).sum() + loss).backward()
    for name, tensor in (*plain.named_parameters(), ("scale", plain.scale)):
        ours = dict((*planned.named_parameters(), *planned.named_buffers()))[name]
        assert torch.equal(ours.grad, tensor.grad), name


class Checkpointed(nn.Module):
    """A model with checkpoints of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.inner = reentrant, nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_model_are_the_plan_s_to_make(reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    planned, plain = planned_and_plain(Checkpointed(reentrant), x, budget="100%", strategy="store_all")
    assert planned.source.count("addmm(") == 1
    equal_after(lambda m: m(x).pow(2).sum().backward(), planned, plain)


class Masked(nn.Linear):
    """Makes a mask, step by step, of a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.padding = torch.arange(16) > 12

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(self.padding, dtype=x.dtype).masked_fill_(self.padding, -math.inf)
        mask[2:4] += self.padding[2:4] + 1.0
        return (super().forward(x) + mask).softmax(-1)


def test_what_is_made_of_plain_tensors_is_changed_in_place() -> None:
    equal_after(step, *planned_and_plain(Masked()))


class Named(nn.Module):
    """A model that calls parts, methods and buffers of its own what planned modules have beside."""

    plans = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Linear(16, 4)
        self.register_buffer("source", torch.ones(4))
        self._model = nn.Tanh()

    def prepare(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self._model(self.plan(self.prepare(x))) * self.source


def test_attributes_of_the_model_with_our_names_are_the_model_s() -> None:
    planned, plain = planned_and_plain(Named())
    assert isinstance(planned.plan, nn.Linear)
    assert isinstance(planned._model, nn.Tanh)
    assert planned.plans == ("a", "b")
    assert torch.equal(planned.source, torch.ones(4))
    assert torch.equal(planned.prepare(X), X * 2)
    equal_after(lambda model: model(X).sum().backward(), planned, plain)
    planning = rematplan.planning(planned)
    assert planning.plan.estimate.peak <= planning.plan.budget
    assert len(planning.prepare(X[:3]).plans) == len(planning.plans) == 2
    assert "def forward(" in planning.source


def test_attributes_that_are_set_later_go_before_ours() -> None:
    planned, plain = planned_and_plain(nn.Linear(16, 16))
    assert planned.plan is rematplan.planning(planned).plan
    planned.source, plain.source = "mine", "mine"
    planned.plan = nn.Identity()
    assert planned.source == "mine"
    assert isinstance(planned.plan, nn.Identity)
    del planned.plan
    assert planned.plan is rematplan.planning(planned).plan
    with pytest.raises(UsageError, match="not planned"):
        rematplan.planning(plain)


class Momentum(nn.Module):
    """An encoder beside a slower one that follows it, and a buffer that follows the input, both by their ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.quick, self.slow = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.quick.to(x.device)  # assigns each parameter its own data
        for p, q in zip(self.slow.parameters(), self.quick.parameters(), strict=True):
            p.data = p.data * 0.9 + q.data * 0.1
        self.mean.data = self.mean.data * 0.9 + x.mean(0) * 0.1
        return self.quick(x).tanh() * self.slow(x - self.mean)


def test_what_a_forward_assigns_as_data_is_assigned() -> None:
    torch.manual_seed(0)
    planned, plain = planned_and_plain(Momentum())

    def use(model: nn.Module) -> list[Tensor]:
        for _ in range(2):
            step(model)
        return list(model.slow.parameters())

    equal_after(use, planned, plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tracers_see_the_model() -> None:
    planned, plain = planned_and_plain(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    for traced in (torch.fx.symbolic_trace(planned), torch.jit.trace(planned, (X,))):
        assert torch.equal(traced(X), plain(X))


class Quantised(nn.Linear):
    """An op that gives, beside its result, four buffers' new content, which nothing else reads."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))
        for name, value in (("low", -1.0), ("high", 1.0)):
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        state = self.on, self.on, self.low, self.high, self.scale, self.zero
        weight = torch.fused_moving_avg_obs_fake_quant(self.weight, *state, 0.01, 0, 255, -1)
        return nn.functional.linear(x, weight, self.bias).tanh()


class QuantisedByRows(Quantised):
    """The same op, which sizes its four buffers when it is first called: a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        state = self.on, self.on, self.low, self.high, self.scale, self.zero
        weight = torch.fused_moving_avg_obs_fake_quant(self.weight, *state, 0.01, 0, 255, 0, True)
        return nn.functional.linear(x, weight, self.bias).tanh()


def test_buffers_that_are_sized_in_the_first_step() -> None:
    planned, plain = planned_and_plain(QuantisedByRows())
    for _ in range(2):
        equal_after(step, planned, plain)
    assert planned.low.shape == (16,)


class Table(nn.Linear):
    """Replaces a buffer by a table of its input's size, unless it has that size."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != len(x):
            self.table = torch.arange(len(x), dtype=torch.float32)[:, None].sqrt()
        return super().forward(x).tanh() * self.table


def test_a_buffer_that_a_forward_replaces_by_another_size_is_replaced() -> None:
    planned, plain = planned_and_plain(nn.Sequential(Table(), nn.Linear(16, 16)))
    for _ in range(3):
        equal_after(step, planned, plain)
    assert planned[0].table.shape == (len(X), 1)


def test_an_op_that_renews_buffers_runs_again() -> None:
    torch.manual_seed(0)
    planned, plain = planned_and_plain(nn.Sequential(*(Quantised() for _ in range(4))))
    runs = [one.op for one in planned.plan.schedule if isinstance(one, Run) and "fq_helper" in one.op]
    assert len(runs) > 4
    equal_after(step, planned, plain)


class Filling(nn.Linear):
    """Leaves what it computes in the lists and dictionaries that it is given."""

    def forward(self, batch: dict[str, Any], features: list[Tensor], pair: tuple[list[int], int]) -> Any:
        y = super().forward(batch["inner"].pop("x"))
        batch["y"], batch["inner"]["moved"] = y, batch.pop("extra")
        features.append(y.tanh())
        pair[0][0] = 7
        return batch


def test_what_a_forward_leaves_in_its_arguments_is_left() -> None:
    x, extra = torch.randn(8, 4), torch.ones(3)
    plain = Filling(4, 4)

    def given() -> tuple[Any, ...]:
        return {"inner": {"x": x, "n": 1}, "extra": extra}, [x], ([3, 4], 5)

    ours = rematplan.plan_module(
        copy.deepcopy(plain), given(), budget="min", strategy="approx_dp", costs="roofline"
    )
    for _ in range(2):
        left = []
        for model in (plain, ours):
            batch, features, pair = given()
            inner = batch["inner"]
            out = model(batch, features, pair)
            (out["y"].sum() + features[1].sum()).backward()
            assert batch["inner"] is inner
            assert (id(inner["moved"]), id(features[0]), pair) == (id(extra), id(x), ([7, 4], 5))
            left.append((list(batch), list(inner), batch["y"], features[1], model.weight.grad.clone()))
        assert left[0][:2] == left[1][:2]
        assert all(torch.equal(a, b) for a, b in zip(left[0][2:], left[1][2:], strict=True))


class Announced:
    """Keeps a list of those that are derived from it, and wants to know their name."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, announced: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Announced.known.append(announced)


class Empty(Announced, nn.Sequential, announced="empty"):
    """Is false: its length is zero."""

    def __len__(self) -> int:
        return 0


def test_a_class_that_wants_to_know_is_not_told_of_a_planned_one() -> None:
    model = Empty(nn.Linear(4, 4), nn.Tanh())
    ours = rematplan.plan_module(
        model, (torch.ones(2, 4),), budget="min", strategy="approx_dp", costs="roofline", policy=["0.*"]
    )
    assert torch.equal(ours(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert Announced.known == ["empty"]


TABLE = torch.arange(4.0)


class GivesConstants(nn.Module):
    """Gives tensors that it does not compute: a global one, and one that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), torch.ones(3, 2).t()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x).tanh(), TABLE, self.kept


def test_constants_are_outputs_too() -> None:
    model = GivesConstants()
    planned = rematplan.plan_module(
        copy.deepcopy(model), (torch.ones(2, 4),), budget="100%", strategy="approx_dp", costs="roofline"
    )
    for one in (planned, model):
        outputs = one(torch.ones(2, 4))
        outputs[0].square().sum().backward()
        assert torch.equal(outputs[1], TABLE)
        assert torch.equal(outputs[2], model.kept)
    assert torch.equal(planned.linear.weight.grad, model.linear.weight.grad)
