"""Making a plan keeps no tensors of the call for which it is made: the budget counts only those of the present call."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from parts_models import ASKED, WIDTH, Block, Dropping, made, seeded
from torch import Tensor, nn

import rematplan
from rematplan.ir import InfeasibleBudget
from rematplan.plans.planner import _first_fitting


def refused(budget: str = "30%") -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(4)))
    return rematplan.apply(model, budget, on_infeasible="least", **ASKED)


def refused_later() -> nn.Module:
    model = refused("60%")
    model(torch.randn(8, WIDTH)).sum().backward()
    model.zero_grad()
    return model


def in_parts() -> nn.Module:
    seeded(0)
    return rematplan.apply(nn.Sequential(made(Undrawn)[0]), "100%", **ASKED)


class Undrawn(Dropping):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.body(x)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("prepared", [refused, refused_later, in_parts])
def test_tensors_of_a_call_end_with_it(prepared: Callable[[], nn.Module]) -> None:
    model, x = prepared(), torch.randn(192, WIDTH)
    y = model(x)
    kept = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert kept[1]() is None
    gc.collect()  # a capture leaves cycles of objects that hold its inputs
    assert kept[0]() is None


@pytest.mark.usefixtures("no_collection")
def test_a_second_refusal_keeps_no_frames() -> None:
    kept = []

    def within(budget: int) -> None:
        if budget < 20:
            raise InfeasibleBudget("auto", budget, 20)

    def call() -> None:
        x = torch.ones(1)
        kept.append(weakref.ref(x))
        _first_fitting(within, InfeasibleBudget("auto", 1, 10), 100)

    call()
    assert kept[0]() is None
