"""Laws of forwards that read numbers from activations to store or return them: the user gets those of eager mode."""

import copy
import gc
import queue
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.module.verification import same_bits

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Body = Callable[["Logging", Tensor], Any]


class Meter:
    """A running sum, as training loops have it."""

    def __init__(self) -> None:
        self.val, self.sum, self.count = 0.0, 0.0, 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n


class Logging(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.dropout, self.body = nn.Linear(4, 4), nn.Dropout(0.3), body
        self.log: dict[str, Any] = {}
        self.losses: list[float] = []
        self.total, self.last, self.meter = 0.0, 0.0, Meter()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.dropout(self.linear(x)).tanh())


def in_a_dictionary(model: Logging, y: Tensor) -> Tensor:
    loss = y.square().mean()
    model.log["loss"] = loss.item()
    model.log["accuracy"] = 100 * (y > 0).float().mean().item()
    model.log["hits"] = (y > 0).sum().item()
    return loss


def in_a_list(model: Logging, y: Tensor) -> Tensor:
    model.losses.append(round(y.mean().item(), 3))
    return y.sum()


def in_a_sum(model: Logging, y: Tensor) -> Tensor:
    loss = y.square().sum()
    model.total += loss.item()
    model.last = -loss.detach().item() / len(y)
    return loss


def in_a_meter(model: Logging, y: Tensor) -> Tensor:
    loss = y.square().mean()
    model.meter.update(loss.item(), 8)
    return loss


def returned(model: Logging, y: Tensor) -> dict[str, Any]:
    loss = y.square().mean()
    return {"loss": loss, "metrics": [loss.item(), {"max": y.max().item()}], "norm": y.norm().item() ** 2}


BODIES = (in_a_dictionary, in_a_list, in_a_sum, in_a_meter, returned)


def planned_and_plain(body: Body) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Logging(body)
    how = {"budget": "1GiB", "costs": "roofline", "strategy": "store_all"}
    return rematplan.plan_module(copy.deepcopy(plain), (X,), **how), plain


def state(model: nn.Module) -> Any:
    return model.log, model.losses, model.total, model.last, vars(model.meter)


def trained(model: nn.Module, x: Tensor, seed: int) -> tuple[list[Tensor], Any]:
    torch.manual_seed(seed)
    model.zero_grad()
    given = model(x)
    loss = given["loss"] if isinstance(given, dict) else given
    loss.backward()
    rest = {k: v for k, v in given.items() if k != "loss"} if isinstance(given, dict) else None
    return [loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()], rest


@pytest.mark.parametrize("body", BODIES)
def test_numbers_that_leave_are_those_of_eager_mode(body: Body) -> None:
    planned, plain = planned_and_plain(body)
    for seed, rows in enumerate((8, 8, 5, 8, 6)):
        found, expected = (trained(model, X[:rows], seed) for model in (planned, plain))
        assert all(map(same_bits, found[0], expected[0]))
        assert repr(found[1]) == repr(expected[1])
        assert repr(state(planned)) == repr(state(plain))
        assert type(planned.total) is float
    assert len(planned.plans) <= 4


def compared(model: Logging, y: Tensor) -> Tensor:
    return y.sum() if y.mean().item() > 0 else y.square().sum()


def computed_with(model: Logging, y: Tensor) -> Tensor:
    return (y / y.max().item()).sum()


def as_float(model: Logging, y: Tensor) -> Tensor:
    model.last = float(y.mean().item())
    return y.sum()


def compared_sum(model: Logging, y: Tensor) -> Tensor:
    model.total += y.mean().item()
    return y.sum() if model.total > 0 else y.square().sum()


def hidden(model: Logging, y: Tensor) -> Tensor:
    model.losses.append({1, y.mean().item()})
    return y.sum()


def filled(model: Logging, y: Tensor) -> Tensor:
    return y.sum() + torch.full((2,), y.mean().item()).sum()


@pytest.mark.parametrize("body", [compared, computed_with, as_float, compared_sum, hidden, filled])
def test_numbers_by_which_python_decides_or_computes_have_no_plan(body: Body) -> None:
    with pytest.warns(UserWarning, match="reads values of tensors"):
        planned_and_plain(body)


SINK: queue.Queue[float] = queue.Queue()


def sent_away(model: Logging, y: Tensor) -> Tensor:
    SINK.put(y.mean().item())
    return y.sum()


def as_text(model: Logging, y: Tensor) -> Tensor:
    model.log["text"] = str([y.mean().item()])
    return y.sum()


@pytest.mark.parametrize("body", [sent_away, as_text])
def test_numbers_that_leave_otherwise_have_no_plan(body: Body) -> None:
    with pytest.warns(UserWarning, match=r"planned call does not change|reads values of tensors"):
        planned_and_plain(body)
    while not SINK.empty():
        SINK.get()


def test_a_plan_does_not_keep_the_batch_of_its_capture() -> None:
    plain, x = Logging(in_a_sum), X.clone()
    planned = rematplan.plan_module(plain, (x,), budget="1GiB", costs="roofline", strategy="store_all")
    planned(x).backward()
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def drop(model: Logging, y: Tensor) -> Tensor:
    return (y * 2 if torch.rand(1).item() < 0.5 else y.exp()).sum()


def choice(model: Logging, y: Tensor) -> Tensor:
    scale = (1.0, 2.0, 3.0)[int(torch.empty(1).uniform_(0.0, 3.0).item())]
    model.last = torch.rand(()).item()
    return (y * scale).sum()


@pytest.mark.parametrize("body", [drop, choice])
def test_a_drawn_number_may_be_compared_or_become_an_integer(body: Body) -> None:
    planned, plain = planned_and_plain(body)
    for seed in (1, 2, 3, 4, 1, 2, 3, 4):
        found, expected = (trained(model, X, seed) for model in (planned, plain))
        assert all(map(same_bits, found[0], expected[0]))
        assert planned.last == plain.last
    assert 2 <= len(planned.plans) <= 4
