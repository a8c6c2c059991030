"""Laws of dataclasses and other objects: their tensors are arguments of the plan, and those of dataclasses its results,
with the bits of eager mode."""

import copy
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from same_bits import equal_after
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError
from rematplan.module.plan_access import with_runner


@dataclass
class Batch:
    x: Tensor
    weight: Tensor | None = None
    seen: list[str] = field(default_factory=list)

    @property
    def twice(self) -> Tensor:
        return 2 * self.x


@dataclass(frozen=True)
class Features:
    layers: tuple[Tensor, ...]
    name: str = "features"


@dataclass
class Found:
    value: Tensor
    features: Features
    batch: Batch
    means: SimpleNamespace

    def loss(self) -> Tensor:
        return self.value.square().mean() + sum(
            (t.mean() for t in self.features.layers), self.means.last.sum()
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, batch: Batch) -> Found:
        h, made = batch.twice, []
        for layer in self.layers:
            h = torch.tanh(layer(h))
            made.append(h)
        batch.seen.append(str(len(made)))
        if batch.weight is not None:
            batch.weight = h.detach().mean(1)
        return Found(h, Features(tuple(made[:2])), batch, SimpleNamespace(last=h.exp().mean(1).sum()[None]))


def use(model: nn.Module, weighted: bool) -> list[Tensor]:
    model.zero_grad()
    batch = Batch(torch.linspace(-1, 1, 24).view(4, 6), torch.ones(4) if weighted else None)
    found = model(batch)
    assert (type(found), type(found.features), found.features.name) == (Found, Features, "features")
    assert batch.seen == ["3"]
    found.loss().backward()
    left = [batch.weight] if batch.weight is not None else []
    return [found.value.detach(), *(t.detach() for t in found.features.layers), *left]


def test_dataclasses_are_taken_and_returned_with_the_bits_of_eager_mode() -> None:
    torch.manual_seed(0)
    plain = Net()
    options: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    planned = rematplan.plan_module(copy.deepcopy(plain), (Batch(torch.ones(4, 6)),), budget="min", **options)
    for weighted in (False, True, False):
        equal_after(lambda model, given=weighted: use(model, given), planned, plain)
    assert rematplan.planning(planned).stats().captures == 2


class Store:
    """A store of a graph's tensors that knows the graph, as torch_geometric's does."""

    def __init__(self, graph: "Graph", x: Tensor, scale: float) -> None:
        self.graph, self.x, self.scale = weakref.ref(graph), x, scale

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "graph": self.graph()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, graph=weakref.ref(state["graph"]))


class Graph:
    def __init__(self, x: Tensor, scale: float = 2.0) -> None:
        self.store = Store(self, x, scale)

    @property
    def x(self) -> Tensor:
        graph = self.store.graph()
        assert graph is self
        return self.store.x * self.store.scale


class Pair(UserDict[str, Tensor]):
    @property
    def x(self) -> Tensor:
        return self["left"] - self["right"]


class Table(dict[str, Tensor]):
    """A dictionary whose items are attributes, too."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Sample:
    """With an array, which every pickle copies."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.kept = x, np.arange(3)


class OfObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, batch: dict[str, list[Any]]) -> Tensor:
        (one,) = batch["of"]
        return self.inner(one.x)


def step(model: nn.Module, one: Any) -> list[Tensor]:
    model.zero_grad()
    loss = model({"of": [one]}).square().mean()
    loss.backward()
    return [loss.detach()]


@pytest.mark.parametrize(
    "make", [Graph, Sample, lambda x: Pair(left=x, right=x.flip(1)), lambda x: Table(x=x, other=x.flip(1))]
)
def test_objects_of_any_class_are_opened_and_new_ones_need_no_new_plan(make: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    plain = OfObject()
    options: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    planned = rematplan.apply(copy.deepcopy(plain), "min", **options)
    for _ in range(3):
        one = make(torch.randn(4, 6))
        equal_after(lambda model, given=one: step(model, given), planned, plain)
    assert rematplan.planning(planned).stats().captures == 1
    assert with_runner(planned)._rematplan.parts is None


class Growing(OfObject):
    def forward(self, batch: dict[str, list[Any]]) -> Tensor:
        (one,) = batch["of"]
        y = super().forward(batch)
        if isinstance(one, Table):
            one["y"] = y
        else:
            one.store.y = y
        return y


@pytest.mark.parametrize("make", [Graph, lambda x: Table(x=x)])
def test_a_model_that_changes_the_object_it_is_called_with_is_planned_in_parts(
    make: Callable[[Tensor], Any],
) -> None:
    torch.manual_seed(0)
    plain = Growing()
    options: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    planned = rematplan.apply(copy.deepcopy(plain), "min", **options)

    def changed(model: nn.Module, given: Tensor) -> list[Tensor]:
        one = make(given)
        return [*step(model, one), (one if isinstance(one, Table) else one.store).y.detach()]

    for _ in range(3):
        x = torch.randn(4, 6)
        equal_after(lambda model, given=x: changed(model, given), planned, plain)
    assert with_runner(planned)._rematplan.parts


def test_parts_are_measured_once_for_objects_that_cannot_be_opened() -> None:
    torch.manual_seed(0)

    class Unpicklable:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __reduce_ex__(self, _: Any) -> Any:
            raise TypeError

    plain = OfObject()
    options: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    planned = rematplan.apply(copy.deepcopy(plain), "min", **options)
    divided = set()
    for _ in range(3):
        one = Unpicklable(torch.randn(4, 6))
        equal_after(lambda model, given=one: step(model, given), planned, plain)
        divided.add(id(with_runner(planned)._rematplan.parts.last))
    assert len(divided) == 1


class Giving(nn.Linear):
    """Its result is also in a dictionary of a class that pytrees do not open."""

    def forward(self, x: Tensor) -> tuple[Tensor, Table]:
        y = super().forward(x)
        return y, Table(y=y.sin())


def test_a_dictionary_that_pytrees_do_not_open_is_no_result() -> None:
    planned = rematplan.plan_module(
        Giving(6, 6), (torch.ones(4, 6),), budget="100%", costs="roofline", refine=False
    )
    y, table = planned(torch.ones(4, 6))
    y.sum().backward()
    with pytest.raises(ModelError, match="returns a Table"):
        table["y"]
