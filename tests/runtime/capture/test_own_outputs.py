"""Laws of what a planned step gives: outputs and gradients have memory of their own, and are copied only where it takes
a copy."""

import copy

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.graph.compat import FakeTensorMode

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


class Seen(nn.Linear):
    """Gives a view of what it computes; ``squashed``: of what its backward reads."""

    def __init__(self, squashed: bool) -> None:
        super().__init__(8, 4)
        self.squashed = squashed

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y.tanh() if self.squashed else y).transpose(1, 2)


class Halves(nn.Linear):
    """Gives two views of one tensor, and one of a parameter."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return *super().forward(x).chunk(2, -1), self.weight.t()


def planned_and_plain(model: nn.Module, *args: Tensor) -> tuple[nn.Module, nn.Module]:
    plain = copy.deepcopy(model)
    return rematplan.plan_module(model, args, budget="100%", strategy="store_all"), plain


def test_a_view_of_a_whole_result_is_returned_without_a_copy() -> None:
    ours, plain = planned_and_plain(Seen(squashed=False), X)
    forward = ours.source.partition("def backward")[0]
    assert "transpose" in forward
    assert "clone" not in forward
    for model in (ours, plain):
        y = model(X)
        assert y.stride() == (12, 1, 4)
        y.mul_(2.0)  # nobody needs what was there
        y.square().sum().backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)


def test_a_view_of_what_the_backward_reads_must_not_be_changed() -> None:
    for model in planned_and_plain(Seen(squashed=True), X):
        y = model(X)
        y.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"in.?place"):
            y.sum().backward()


def test_views_that_share_memory_are_returned_as_copies() -> None:
    ours, plain = planned_and_plain(Halves(8, 8), X)
    found, expected = ours(X), plain(X)
    assert all(map(torch.equal, found, expected))
    assert len({t.untyped_storage().data_ptr() for t in (*found, ours.weight)}) == 4
    for parts in (found, expected):
        sum((k + 1) * part.square().sum() for k, part in enumerate(parts)).backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)


class Placed(nn.Module):
    """Multiplies by a parameter that lies in memory in one order, where the gradient comes in another."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        back = sorted(range(3), key=order.__getitem__)
        self.weight = nn.Parameter(torch.randn([(16, 32, 48)[d] for d in order]).permute(back))
        assert self.weight.shape == (16, 32, 48)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).transpose(2, 0).contiguous()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_the_copy_of_a_gradient_with_other_strides_is_charged(order: tuple[int, ...]) -> None:
    x = torch.randn(16, 32, 48)
    ours, plain = planned_and_plain(Placed(order), x)
    tangent = torch.randn(48, 32, 16)

    def step() -> None:
        ours(x).backward(tangent)

    step()
    plain(x).backward(tangent)
    assert torch.equal(ours.weight.grad, plain.weight.grad)
    assert ours.weight.grad.stride() == plain.weight.grad.stride() == ours.weight.stride()
    ours.zero_grad()
    resident = x.nbytes + tangent.nbytes + ours.weight.nbytes
    assert resident + peak_above_entry(step, torch.device("cpu"))[0] <= ours.plan.estimate.peak


class Table(nn.Linear):
    """Makes a tensor of numbers in its forward, as large as all else, and returns it too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.tensor([0.5] * 4096)
        self.made = torch.tensor([1.0, 2.0])
        table[0] = 1.0
        return super().forward(x).tanh() * table[:4], self.made


def test_a_tensor_of_numbers_made_in_a_forward_is_held_once_and_not_changed_by_the_caller() -> None:
    ours, plain = planned_and_plain(Table(8, 4), X)
    for _ in range(2):
        grads = []
        for model in (ours, plain):
            model.zero_grad()
            y, made = model(X)
            assert made.tolist() == [1.0, 2.0] == model.made.tolist()
            made.zero_()
            model.made.add_(1)
            y.square().sum().backward()
            grads.append((y.detach(), *(p.grad for p in model.parameters())))
        assert all(map(torch.equal, *grads))
    model, step = ours, rematplan.planning(ours).plan
    model.zero_grad()
    above, _ = peak_above_entry(lambda: model(X)[0].square().sum().backward(), torch.device("cpu"))
    inputs = X.nbytes + sum(p.nbytes for p in model.parameters())
    assert inputs + above <= step.peak


class Recurrent(nn.LSTM):
    """Gives the outputs of all steps only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def test_the_first_capture_has_the_graph_of_later_ones() -> None:
    """An LSTM's backward gives its biases two equal gradients. Its fake gives one tensor twice, the first time."""
    FakeTensorMode.cache_clear()
    sources = {planned_and_plain(Recurrent(8, 8, batch_first=True), X)[0].source for _ in range(2)}
    assert len(sources) == 1
    assert "own_gradient" not in sources.pop()


@pytest.mark.parametrize(("budget", "strategy"), [("100%", "store_all"), ("min", "exact_dp")])
def test_what_autograd_saves_before_an_op_in_place_is_not_copied(budget: str, strategy: str) -> None:
    layers = [(nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Linear(8, 8), nn.Hardswish(inplace=True))] * 2
    model = nn.Sequential(*(copy.deepcopy(layer) for row in layers for layer in row))
    plain = copy.deepcopy(model)
    ours = rematplan.plan_module(model, (X,), budget=budget, strategy=strategy)
    assert "clone" not in ours.source
    for one in (ours, plain):
        one(X).sum().backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
