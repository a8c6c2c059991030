"""Laws of state that a forward reaches through other objects: what changes there after planning makes another plan, and
what the forward changes there is refused in one line, before an iterator advances."""

import array
import functools
import itertools
import os
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from same_bits import SETTINGS, X
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError, UsageError

VARIABLE = "REMATPLAN_REACHED"


class Gain:
    """Has its number from its class until it gets its own."""

    by = 2.0

    def __len__(self) -> int:
        return int(self.by)

    def __iter__(self) -> Iterator[float]:
        yield self.by

    def tick(self) -> float:
        self.by += 1
        return self.by


class Remembered:
    """A descriptor that keeps its values beside the objects."""

    def __init__(self) -> None:
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, holder: Any, kind: Any = None) -> float:
        return self.values.get(holder, 1.0)

    def __set__(self, holder: Any, value: float) -> None:
        self.values[holder] = value


GAIN = Gain()
TABLE = {"by": 2.0}


class Net(nn.Module):
    """Scales by what ``rule`` finds."""

    remembered = Remembered()

    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.lin, self.rule = nn.Linear(16, 16), rule
        self.list, self.map = [Gain()], {"a": (Gain(),)}
        self.one, self.other = 1.0, 2.0
        self.deep = [[[[[Gain()]]]]]
        self.nested = {"a": {"b": {"c": {"d": {"e": 1.0}}}}}
        self.many, self.numbers, self.large = [1.0] * 3000, array.array("d", [1.0]), np.ones(100_000)
        self.objects = np.array([Gain()], dtype=object)
        self.closed = closed_over(Gain())
        self.partial = functools.partial(scaled, by=2.0)
        self.proxy = types.MappingProxyType(TABLE)
        self.kept, self.step = weakref.ref(GAIN), 0
        self.cycle, self.iterators = itertools.cycle([1.0, 2.0]), [itertools.cycle([1.0, 2.0])]
        self.next = itertools.cycle([1.0, 2.0]).__next__
        self.taken = functools.partial(next, itertools.cycle([1.0, 2.0]))

    @functools.cached_property
    def drawn(self) -> Tensor:
        return torch.rand(16) + 1

    @property
    def doubled(self) -> Iterator[float]:
        return (2 * by for by in (self.one, self.other))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.rule(self)


def scaled(by: float) -> float:
    return by


def closed_over(gain: Gain) -> Callable[[], float]:
    return lambda: gain.by


def larger(gain: Any) -> None:
    gain.by += 3


OUTSIDE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an object in a list": (lambda s: s.list[0].by, lambda s: larger(s.list[0])),
    "an object in a tuple in a dictionary": (lambda s: s.map["a"][0].by, lambda s: larger(s.map["a"][0])),
    "an object that a function closes over": (
        lambda s: s.closed(),
        lambda s: larger(s.closed.__closure__[0].cell_contents),
    ),
    "an object that is weakly referenced": (lambda s: s.kept().by, lambda _: larger(GAIN)),
    "a special method": (lambda s: len(s.list[0]), lambda s: larger(s.list[0])),
    "iteration": (lambda s: sum(s.list[0]), lambda s: larger(s.list[0])),
    "an object in many lists": (lambda s: s.deep[0][0][0][0][0].by, lambda s: larger(s.deep[0][0][0][0][0])),
    "dictionaries in dictionaries": (
        lambda s: s.nested["a"]["b"]["c"]["d"]["e"],
        lambda s: s.nested["a"]["b"]["c"]["d"].update(e=3.0),
    ),
    "a long list": (lambda s: s.many[2000], lambda s: s.many.__setitem__(2000, 3.0)),
    "an array of Python": (lambda s: s.numbers[0], lambda s: s.numbers.__setitem__(0, 3.0)),
    "a large array": (lambda s: float(s.large[-1]), lambda s: s.large.__setitem__(-1, 3.0)),
    "an array of objects": (lambda s: s.objects[0].by, lambda s: larger(s.objects[0])),
    "a view of a dictionary": (lambda s: s.proxy["by"], lambda _: TABLE.update(by=TABLE["by"] + 1)),
    "a partial function's arguments": (lambda s: s.partial(), lambda s: s.partial.keywords.update(by=3.0)),
    "attributes that are gone through": (
        lambda s: sum(v for v in vars(s).values() if isinstance(v, float)),
        lambda s: setattr(s, "other", 5.0),
    ),
    "a variable of the environment by a constant": (
        lambda _: float(os.environ.get(VARIABLE, 1)),
        lambda _: os.environ.update({VARIABLE: "4"}),
    ),
    "a hook of all modules": (
        lambda _: 1.0,
        lambda _: nn.modules.module.register_module_forward_hook(
            lambda m, _x, y: 2 * y if isinstance(m, nn.Linear) else y
        ),
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_changed_behind_objects_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    rule, change = OUTSIDE[name]
    ours = rematplan.plan_module(Net(rule), (X,), **SETTINGS)
    before = ours(X)
    assert torch.equal(ours(X), before)
    assert len(ours.plans) == 1
    hook = change(ours)
    with torch.no_grad():
        now = ours(X)  # the model itself runs
    assert not torch.equal(now, before)
    assert torch.equal(ours(X), now)
    assert len(ours.plans) == 2
    if hook is not None:
        hook.remove()


def remembering(s: Any) -> float:
    s.remembered = s.remembered + 1
    return s.remembered


BEHIND: dict[str, Callable[[Any], Any]] = {
    "an object in a list": lambda s: s.list[0].tick(),
    "an object in a tuple": lambda s: s.map["a"][0].tick(),
    "a descriptor": remembering,
}
ITERATORS: dict[str, Callable[[Any], Any]] = {
    "an iterator": lambda s: next(s.cycle),
    "an iterator in a list": lambda s: next(s.iterators[0]),
    "a method of an iterator": lambda s: s.next(),
    "a function of an iterator": lambda s: s.taken(),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_a_forward_changes_behind_objects_leaves_the_model_in_eager_mode(name: str) -> None:
    model = Net(BEHIND[name])
    with pytest.warns(UserWarning, match="no part of it can be planned") as told:
        rematplan.plan_module(model, (X,), **SETTINGS)
    assert len(str(told[0].message).splitlines()) == 1
    assert (model.list[0].by, model.map["a"][0].by, model.remembered) == (2.0, 2.0, 1.0)


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_that_a_forward_advances_is_refused(name: str) -> None:
    model = Net(ITERATORS[name])
    iterators = (model.cycle, model.iterators[0], model.next.__self__, model.taken.args[0])
    with pytest.raises(ModelError) as error:
        rematplan.plan_module(model, (X,), **SETTINGS)
    assert len(str(error.value).splitlines()) == 1
    assert [next(one) for one in iterators] == [1.0] * 4


def test_a_cached_property_is_computed_once() -> None:
    def outputs(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        return [model(X).detach() for _ in range(3)]

    torch.manual_seed(0)
    expected = outputs(Net(lambda s: s.drawn))
    torch.manual_seed(0)
    ours = rematplan.plan_module(Net(lambda s: s.drawn), (X,), **SETTINGS)
    assert all(map(torch.equal, outputs(ours), expected))
    assert len(ours.plans) == 2


def test_an_iterator_that_a_property_makes_anew_is_no_state() -> None:
    torch.manual_seed(0)
    model = Net(lambda s: sum(s.doubled) + sum(s.doubled))
    expected = model(X)
    ours = rematplan.plan_module(model, (X,), **SETTINGS)
    assert all(torch.equal(ours(X), expected) for _ in range(2))
    assert len(ours.plans) == 1


class Alternating(torch.autograd.Function):
    """Counts its backwards, and goes by the number."""

    calls = 0

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Any:
        Alternating.calls += 1
        return grad * (1 + Alternating.calls % 2)


class Counted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Alternating.apply(super().forward(x))


def test_a_backward_that_changes_state_has_no_plan() -> None:
    with pytest.warns(UserWarning, match="the backward changes calls") as told:
        rematplan.plan_module(Counted(16, 16), (X,), **SETTINGS)
    assert len(str(told[0].message).splitlines()) == 1
    assert Alternating.calls == 0


LOGS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a list of tensors": lambda s, g: s.norms.append(g.norm()),
    "a private dictionary": lambda s, g: s._by_name.update(last=g.norm().item()),
    "an attribute": lambda s, g: setattr(s, "norm", g.norm().item()),
    "a gradient kept": lambda s, g: setattr(s, "kept", g),
}


class Logging(nn.Module):
    """Logs the norms of a gradient by a hook of a tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norms, self._by_name = how, list[Any](), dict[str, float]()
        self.first, self.second = (
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)

        def note(gradient: Tensor) -> None:
            LOGS[self.how](self, gradient)

        h.register_hook(note)
        return self.second(h)

    def told(self) -> list[float]:
        kept = [
            *self.norms,
            *self._by_name.values(),
            getattr(self, "norm", 0.0),
            getattr(self, "kept", X).sum(),
        ]
        return [float(one) for one in kept]


@pytest.mark.parametrize("how", LOGS)
def test_a_hook_that_logs_a_gradient_runs_in_every_step(how: str) -> None:
    models = Logging(how), Logging(how)
    models[1].load_state_dict(models[0].state_dict())
    rematplan.apply(models[1], **SETTINGS)
    for _ in range(3):
        for model in models:
            model(X).square().mean().backward()
        assert models[0].told() == models[1].told()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in models), strict=True))
    assert len(rematplan.planning(models[1]).plans) == 2


def test_parameters_without_a_shape_are_refused_in_place() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match="without a shape"):
        rematplan.apply(model, **SETTINGS)
