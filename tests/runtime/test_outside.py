"""Laws of what a forward finds outside of its tensors: what is changed there after planning counts, and what is not
costs no further plan."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

FLAG, SCALE, SHIFT = True, 2.0, torch.ones(4)
CONFIG: dict[str, Any] = {"on": True, "inner": {"slope": 2.0}, "act": torch.tanh}
RECORD = SimpleNamespace(power=1, deep=SimpleNamespace(bias=0.5))
LIBRARY = ModuleType("somebodys")
LIBRARY.FACTOR = 3.0
KINDS = [nn.Tanh]
COUNT = STEP = 0
REGISTRY: dict[str, Any] = {"linear": nn.Linear}


class Options:
    """Read by its own name."""

    low = -1.0


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def called(x: Tensor) -> Tensor:
        return function(x) + 1

    return called


@decorated
def wrapped(x: Tensor) -> Tensor:
    return x * RECORD.deep.bias


@torch.no_grad()
def offset(x: Tensor) -> Tensor:
    return x.mean() * LIBRARY.FACTOR


def closed_over() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    by = 1.0

    def shifted(x: Tensor) -> Tensor:
        return x + by

    def shift_by(value: float) -> None:
        nonlocal by
        by = value

    return shifted, shift_by


SHIFTED, SHIFT_BY = closed_over()


class Part(nn.Module):
    """Has a method and an attribute of its class."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


class Net(nn.Module):
    """Looks everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.act = Part(), torch.sigmoid
        self.table = {"on": True, "act": torch.tanh}

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.part(x)) + SHIFT
        y = helper(y) if FLAG else y
        if CONFIG["on"] and self.table["on"]:
            y = CONFIG["act"](y) * CONFIG["inner"]["slope"]
        y = y.clamp(min=Options.low) ** RECORD.power
        for kind in KINDS:
            y = kind()(y)
        return wrapped(SHIFTED(y)) + offset(y)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test changes is changed back."""
    for name in ("FLAG", "SCALE", "SHIFT", "RECORD", "COUNT", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    for holder, name in ((Options, "low"), (Part, "gain"), (Part, "scaled"), (Part, "forward"), (Net, "forward"),
                         (nn.Linear, "forward"), (LIBRARY, "FACTOR"), (RECORD, "power"),
                         (RECORD.deep, "bias")):  # fmt: skip
        monkeypatch.setattr(holder, name, getattr(holder, name))
    for held in (CONFIG, CONFIG["inner"], REGISTRY):
        for key, value in held.items():
            monkeypatch.setitem(held, key, value)
    kinds = list(KINDS)
    yield
    KINDS[:] = kinds
    SHIFT_BY(1.0)


def planned(model: nn.Module, **options: Any) -> nn.Module:
    return rematplan.plan_module(
        model, (X,), budget="100%", strategy="store_all", costs="roofline", **options
    )


@functools.cache
def planned_net() -> nn.Module:
    return planned(Net())


def set_global(name: str, value: Any) -> Callable[[Net], None]:
    return lambda _: globals().__setitem__(name, value)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "a flag": set_global("FLAG", False),
    "a number that a function reads": set_global("SCALE", 3.0),
    "another tensor": set_global("SHIFT", 2 * torch.ones(4)),
    "a key beside functions": lambda _: CONFIG.update(on=False),
    "a function in a dictionary": lambda _: CONFIG.update(act=torch.sin),
    "a dictionary in a dictionary": lambda _: CONFIG["inner"].update(slope=5.0),
    "a record": lambda _: setattr(RECORD, "power", 2),
    "a record in a record": lambda _: setattr(RECORD.deep, "bias", 7.0),
    "another record": set_global("RECORD", SimpleNamespace(power=3, deep=SimpleNamespace(bias=0.5))),
    "a module's variable": lambda _: setattr(LIBRARY, "FACTOR", 9.0),
    "a list that grows": lambda _: KINDS.append(nn.Sigmoid),
    "a class by its name": lambda _: setattr(Options, "low", 3.0),
    "a function": set_global("helper", lambda x: x - 1),
    "a cell": lambda _: SHIFT_BY(4.0),
    "an attribute of a class": lambda _: setattr(Part, "gain", 2.0),
    "an object's own instead of its class's": lambda m: setattr(m.part, "gain", 2.0),
    "a function in an attribute": lambda m: setattr(m, "act", torch.tanh),
    "a dictionary in an attribute": lambda m: m.table.update(on=False),
    "a method": lambda _: setattr(Part, "scaled", lambda _self, x: x * 5),
    "a part's own method": lambda m: setattr(m.part, "scaled", lambda x: x * 5),
    "a part's forward": lambda m: setattr(m.part, "forward", lambda x: m.part.linear(x) * 7),
    "a class's forward": lambda _: setattr(Part, "forward", lambda self, x: self.linear(x) * 7),
    "the class's forward": lambda _: setattr(Net, "forward", lambda self, x: self.part(x)),
    "a library's forward": lambda _: setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_changed_after_planning_counts(change: Callable[[Net], Any]) -> None:
    ours = copy.deepcopy(planned_net())  # with its plan
    before = ours(X)
    change(ours)
    with torch.no_grad():
        now = ours(X)  # the model itself runs
    assert not torch.equal(now, before)
    assert torch.equal(ours(X), now)
    assert len(ours.plans) == 2


def test_what_stays_costs_no_further_plan() -> None:
    model = Net()
    ours = planned(model, dynamic=False)
    globals().update(STEP=1)  # nobody reads it
    RECORD.note = "nor this"
    KINDS[:] = list(KINDS)
    globals().update(SCALE=float("2.0"))
    for _ in range(2):
        assert torch.equal(ours(X), model(X))
    assert len(ours.plans) == 1
    globals().update(SCALE=2)  # a whole number may compute otherwise
    with pytest.raises(ModelError, match="planned for other shapes"):
        ours(X)


class Counting(nn.Module):
    """Sets what lies outside of it, and goes by what somebody registers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = REGISTRY["linear"](4, 4)

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return self.linear(x) if "linear" in REGISTRY else x


def test_what_the_forward_itself_sets_is_said_and_costs_no_further_plan() -> None:
    with pytest.warns(UserWarning, match="Counting sets COUNT, which a planned one does not"):
        ours = planned(Counting())
    for _ in range(3):
        globals().update(COUNT=COUNT + 1)
        ours(X).sum().backward()
    assert len(ours.plans) == 1


def test_registries_may_grow() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = planned(Counting())
    REGISTRY["tanh"] = nn.Tanh
    ours(X)
    assert len(ours.plans) == 1


class Noting(Part):
    """Uses an installed library."""

    def forward(self, x: Tensor) -> Tensor:
        networkx.Graph().add_edge(0, 1)
        return super().forward(x)


def test_nobody_looks_into_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = planned(Noting())
    monkeypatch.setattr(networkx.Graph, "node_attr_dict_factory", type("Others", (dict,), {}))
    ours(X)
    assert len(ours.plans) == 1
