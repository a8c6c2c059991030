"""Laws of forwards that make texts of tensors: a text that decides is that of eager mode, or the forward is refused."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.module.verification import same_bits

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
HOW = {"budget": "1GiB", "costs": "roofline", "strategy": "store_all"}
Body = Callable[["Telling", Tensor, Tensor], Any]


class Telling(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body, self.note, self.notes = nn.Linear(4, 4), body, "", []

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).tanh()
        found = self.body(self, x, y)
        return y.square().sum() if found is None else found


def printed(_model: Telling, x: Tensor, y: Tensor) -> None:
    print(f"mean {y.mean():.2f}", y, "%s" % x, [f"{one}" for one in y][:1])  # noqa: UP031
    print(f"{y.sum().item():.4f} of {y.mean().item()}")


def logged(_model: Telling, x: Tensor, y: Tensor) -> None:
    text = f"{y.mean():.3f}"
    text += " and {}".format(y.sum()) if len(x) > 2 else ""  # noqa: UP032
    logging.getLogger(__name__).info("%s %s", y, text)
    logging.getLogger(__name__).debug(text)


def raised(_model: Telling, _x: Tensor, y: Tensor) -> None:
    assert y is not None, f"no {y}"
    if torch.isnan(y).any():
        raise ValueError(f"{y} has no numbers")


@pytest.mark.parametrize("body", [printed, logged, raised])
def test_texts_that_only_leave_decide_nothing(body: Body) -> None:
    plain = Telling(body)
    planned = rematplan.plan_module(copy.deepcopy(plain), (X,), **HOW)
    for model in (plain, planned):
        model(X).backward()
    assert all(map(same_bits, *([p.grad for p in m.parameters()] for m in (plain, planned))))


def searched(_model: Telling, _x: Tensor, y: Tensor) -> Any:
    return y.exp().sum() if "nan" in f"{y}" else None


def parsed(_model: Telling, _x: Tensor, y: Tensor) -> Any:
    return y.sum() * float(f"{y.mean():.1f}")


def printed_and_measured(_model: Telling, _x: Tensor, y: Tensor) -> Any:
    text = str(y)
    print(text)
    return y.sum() if len(text) > 3 else None


def stored(model: Telling, _x: Tensor, y: Tensor) -> None:
    model.note = f"{y.mean()}"


def appended(model: Telling, _x: Tensor, y: Tensor) -> None:
    model.notes.append(repr(y))


def returned(_model: Telling, _x: Tensor, y: Tensor) -> Any:
    return {"loss": y.sum(), "text": format(y.mean(), ".2f")}


def of_a_weight(model: Telling, _x: Tensor, y: Tensor) -> Any:
    return y.sum() if hash(f"{model.linear.weight!r}") % 2 else None


def of_a_number(_model: Telling, _x: Tensor, y: Tensor) -> Any:
    return y.sum() if f"{y.mean().item()}".startswith("-") else None


@pytest.mark.parametrize(
    "body", [searched, parsed, printed_and_measured, stored, appended, returned, of_a_weight, of_a_number]
)
def test_texts_of_unknown_values_that_may_decide_have_no_plan(body: Body) -> None:
    with pytest.warns(UserWarning, match="reads values of tensors"):
        rematplan.plan_module(Telling(body), (X,), **HOW)


def of_the_input(_model: Telling, x: Tensor, y: Tensor) -> Any:
    return y.exp().sum() if "nan" in f"{x[0]}" or f"{x[1, 0]:.1f}" == "7.0" else None


def test_texts_of_known_values_are_guarded() -> None:
    plain = Telling(of_the_input)
    planned = rematplan.plan_module(copy.deepcopy(plain), (X,), **HOW)
    other = X.clone()
    other[1, 0] = 7.0
    for x in (X, other, X):
        for model in (plain, planned):
            model.zero_grad()
            model(x).backward()
        assert all(map(same_bits, *([p.grad for p in m.parameters()] for m in (plain, planned))))
    assert len(planned.plans) == 2
