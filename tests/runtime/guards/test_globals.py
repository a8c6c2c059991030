"""Laws of what a forward finds outside of its tensors: what is changed there after planning counts, and what is not
costs no further plan."""

import copy
import functools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
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
POWER = ContextVar("POWER", default=1.0)
LEAKY = nn.LeakyReLU(0.5)
COUNT = STEP = LAST = 0
RECENT: Any = [1.0]
EXTRA = [2.0]
REGISTRY: dict[str, Any] = {"linear": nn.Linear}


class Options:
    """Read by its own name."""

    low = -1.0


def from_the_environment(x: Tensor, extra: list[float] = EXTRA) -> Tensor:
    y = x + float(os.environ.get("REMATPLAN_ADDED", "0"))
    return y * extra[0] * (2 if os.getenv("REMATPLAN_TWICE") else 1)


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


class Slotted:
    """Has no dictionary."""

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 2.0


class Times:
    """Is called, and goes by what it has."""

    def __init__(self) -> None:
        self.by = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


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
        y = from_the_environment(LEAKY(-y)) * POWER.get()
        return wrapped(SHIFTED(y)) + offset(y)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test changes is changed back."""
    for name in ("FLAG", "SCALE", "SHIFT", "RECORD", "COUNT", "LAST", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    for holder, name in ((Options, "low"), (Part, "gain"), (Part, "scaled"), (Part, "forward"), (Net, "forward"),
                         (nn.Linear, "forward"), (LIBRARY, "FACTOR"), (RECORD, "power"),
                         (RECORD.deep, "bias"), (LEAKY, "negative_slope")):  # fmt: skip
        monkeypatch.setattr(holder, name, getattr(holder, name))
    for held in (CONFIG, CONFIG["inner"], REGISTRY):
        for key, value in held.items():
            monkeypatch.setitem(held, key, value)
    kinds = list(KINDS)
    yield
    KINDS[:] = kinds
    SHIFT_BY(1.0)
    POWER.set(1.0)
    EXTRA[:] = [2.0]
    for name in ("REMATPLAN_ADDED", "REMATPLAN_TWICE"):
        os.environ.pop(name, None)


def planned(model: nn.Module, **options: Any) -> nn.Module:
    return rematplan.plan_module(
        model, (X,), budget="1GiB", strategy="store_all", costs="roofline", **options
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
    "a variable of the environment": lambda _: os.environ.update(REMATPLAN_ADDED="1"),
    "another variable of the environment": lambda _: os.environ.update(REMATPLAN_TWICE="1"),
    "a default argument": lambda _: EXTRA.insert(0, 3.0),
    "a variable of the context": lambda _: POWER.set(3.0),
    "a module beside the model": lambda _: setattr(LEAKY, "negative_slope", 3.0),
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


def test_a_variable_of_the_environment_that_is_set_before_planning_stands() -> None:
    os.environ["REMATPLAN_ADDED"] = "12.5"  # Python makes a new string of it at each access
    ours = planned(Net())
    ours(X)
    assert len(ours.plans) == 1
    os.environ["REMATPLAN_ADDED"] = "13.5"
    with torch.no_grad():
        now = ours(X)
    assert torch.equal(ours(X), now)
    assert len(ours.plans) == 2


class Unsized(tuple[float, ...]):
    """Refuses to say how long it is, as a class of its own may."""

    def __len__(self) -> int:
        raise NotImplementedError


class Answering:
    """Keeps its entries in a dictionary of its own, as many configurations do."""

    def __init__(self, **entries: Any) -> None:
        vars(self)["entries"] = entries

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["entries"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["entries"][name] = value


class Holding(Part):
    """Goes by objects of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.slotted, self.times, self.listed = Slotted(), Times(), [SimpleNamespace(by=2.0)]
        self.method, self.numbers = Times().__call__, np.ones(4, np.float32)
        self.unsized = Unsized((2.0, 1.0))
        self.answering = Answering(by=2.0, inner=Answering(by=1.5), noted=0)
        self.present = SimpleNamespace(by=2.0)
        self.acts = [nn.LeakyReLU(0.5), nn.Sequential(nn.Dropout(0.5).eval(), nn.LeakyReLU(0.5))]
        self.by = self.one = self.other = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.method(self.times(super().forward(x)))
        y = y * self.answering.by * self.answering.inner.by
        if self.present is not None:
            y = y + 1
        for act in self.acts:
            y = act(y - 1)
        y = y * vars(self)["by"] * self.__dict__.get("further", 1.0)
        for name in ("one", "other"):
            y = y * vars(self)[name]
        return y * self.slotted.by * self.listed[0].by * self.unsized[0] * float(self.numbers.sum())


OBJECTS: dict[str, Callable[[Holding], Any]] = {
    "what a called object goes by": lambda m: setattr(m.times, "by", 3.0),
    "what a method's object has": lambda m: setattr(m.method.__self__, "by", 3.0),
    "a slot": lambda m: setattr(m.slotted, "by", 3.0),
    "an object in a list": lambda m: setattr(m.listed[0], "by", 3.0),
    "a tuple without a length": lambda m: setattr(m, "unsized", Unsized((3.0, 1.0))),
    "an entry": lambda m: setattr(m.answering, "by", 3.0),
    "an entry's entry": lambda m: setattr(m.answering.inner, "by", 3.0),
    "another entry": lambda m: setattr(m.answering, "inner", Answering(by=4.0)),
    "an object that is only looked for": lambda m: setattr(m, "present", None),
    "what a module in a list goes by": lambda m: setattr(m.acts[0], "negative_slope", 2.0),
    "what a module in a list's module goes by": lambda m: setattr(m.acts[1][1], "negative_slope", 2.0),
    "what is read in the dictionary of attributes": lambda m: setattr(m, "by", 3.0),
    "what comes to the dictionary of attributes": lambda m: setattr(m, "further", 3.0),
    "what is read by a name out of a tuple": lambda m: setattr(m, "other", 3.0),
    "an array's numbers": lambda m: m.numbers.__setitem__(2, 5.0),
    "the mode of a module in a list": lambda m: m.acts[1].train(),  # the last: it draws numbers from then on
}


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_changed_in_an_object_counts(copied: bool) -> None:
    ours = planned(Holding())
    if copied:
        ours = copy.deepcopy(ours)
    names = list(OBJECTS)
    for name in names[::4] if copied else names:
        for note in range(2):
            ours.answering.noted = note  # nobody reads it
            before = ours(X)
        known = len(ours.plans)  # a copy has objects of its own
        OBJECTS[name](ours)
        with torch.random.fork_rng(), torch.no_grad():
            now = ours(X)
        assert not torch.equal(now, before), name
        for _ in range(2):
            with torch.random.fork_rng():
                assert torch.equal(ours(X), now), name
        assert len(ours.plans) == known + 1, name
        if name == names[0]:
            assert known == 1 + copied


class Configured(nn.Module):
    """Goes by a record of its owner's."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return x * self.config.by


def test_a_record_of_many_parts_may_be_replaced_in_one() -> None:
    config = SimpleNamespace(by=2.0)
    ours = planned(nn.Sequential(nn.Linear(4, 4), Configured(config), Configured(config)))
    copied = copy.deepcopy(ours)
    before = ours(X)
    assert torch.equal(copied(X), before)
    assert len(copied.plans) == 1
    ours[2].config = SimpleNamespace(by=3.0)
    torch.testing.assert_close(ours(X), 1.5 * before)
    assert len(ours.plans) == 2


class Told(Part):
    """Is told by an argument what to do."""

    def forward(self, x: Tensor, how: Any) -> Tensor:
        y = super().forward(x)
        return how(y) if callable(how) else y * how.by


@pytest.mark.parametrize("how", [Times(), Slotted(), SimpleNamespace(by=2.0), SHIFTED])
def test_what_changes_in_an_argument_counts(how: Any) -> None:
    ours = rematplan.plan_module(Told(), (X, how), budget="1GiB", strategy="store_all", costs="roofline")
    before = ours(X, how)
    if how is SHIFTED:
        SHIFT_BY(4.0)
    else:
        how.by = 3.0
    with torch.no_grad():
        now = ours(X, how)
    assert not torch.equal(now, before)
    for _ in range(2):
        assert torch.equal(ours(X, how), now)
    assert len(ours.plans) == 2


def test_what_stays_costs_no_further_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "part", 0)  # the model has an attribute of this name
    model = Net()
    ours = planned(model, dynamic_shapes=False)
    globals().update(STEP=1)  # nobody reads it
    monkeypatch.setitem(globals(), "part", 1)
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
        global COUNT, LAST
        COUNT += 1
        LAST = x.shape[0]
        return self.linear(x) if "linear" in REGISTRY else x


def test_what_the_forward_itself_sets_is_set_and_costs_no_further_plan() -> None:
    ours, before = planned(Counting()), COUNT
    for k in range(3):
        globals().update(LAST=0)
        ours(X).sum().backward()
        assert (before + k + 1, len(X)) == (COUNT, LAST)
    assert len(ours.plans) == 1


class Emptying(Part):
    """Empties what lies outside of it."""

    def forward(self, x: Tensor) -> Tensor:
        RECENT.clear()
        return super().forward(x)


@pytest.mark.parametrize("kind", [list, deque, set])
def test_what_the_forward_empties_is_emptied_at_each_call(kind: type) -> None:
    globals().update(RECENT=kind([1.0]))
    ours = planned(Emptying())
    assert len(RECENT) == 1
    for _ in range(3):
        RECENT.__init__([2.0, 3.0])
        ours(X).sum().backward()
        assert not RECENT


def test_registries_may_grow() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = planned(Counting())
    REGISTRY["tanh"] = nn.Tanh
    ours(X)
    assert len(ours.plans) == 1
