"""Laws of dictionaries in which a forward looks up single keys: entries for other keys may change, and all bits and the
dictionary itself are those of eager mode."""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from same_bits import SETTINGS
from torch import Tensor, nn

import rematplan
from rematplan.module.captures import MANY, Captures

TABLE: dict[Any, Any] = {}
modules: dict[Any, Any] = {}  # a name that nn.Module has, too
ABSENT = object()


class Net(nn.Module):
    of_class: ClassVar[dict[Any, Any]] = {}

    def __init__(self, rule: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.rule = nn.Linear(4, 4), rule
        self.d: dict[Any, Any] = {}
        self.lists: defaultdict[Any, list[float]] = defaultdict(list)
        self.ordered: OrderedDict[Any, Any] = OrderedDict()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.rule(self, x)


def a_number(s: Any, x: Tensor) -> Any:
    if x.shape[0] not in s.d:
        s.d[x.shape[0]] = 1.0 / x.shape[0]
    return s.d[x.shape[0]]


def a_tensor(s: Any, x: Tensor) -> Any:
    key = (x.shape[0], x.device)
    if key not in s.d:
        s.d[key] = torch.arange(x.shape[0])[:, None] / 7.0
    return s.d[key]


def a_text(s: Any, x: Tensor) -> Any:
    return s.d.setdefault(f"{x.shape[0]} rows", x.shape[0] + 0.5)


def a_global(_: Any, x: Tensor) -> Any:
    found = TABLE.get(x.shape[0])
    if found is None:
        found = TABLE[x.shape[0]] = 1.0 + x.shape[0]
    return found


def of_a_common_name(_: Any, x: Tensor) -> Any:
    if x.shape[0] not in modules:
        modules[x.shape[0]] = 0.5 + x.shape[0]
    return modules[x.shape[0]]


def of_a_class(s: Any, x: Tensor) -> Any:
    if x.shape[0] not in s.of_class:
        s.of_class[x.shape[0]] = 3.0 + x.shape[0]
    return s.of_class[x.shape[0]]


def through_a_variable(s: Any, x: Tensor) -> Any:
    d = s.d
    if x.shape[0] not in d:
        d[x.shape[0]] = 2.0 + x.shape[0]
    return d[x.shape[0]]


def ordered(s: Any, x: Tensor) -> Any:
    if x.shape[0] not in s.ordered:
        s.ordered[x.shape[0]] = 2.0
    return s.ordered[x.shape[0]]


RULES = (a_number, a_tensor, a_text, a_global, of_a_class, through_a_variable, ordered)


def gradient(model: nn.Module, rows: int) -> Tensor:
    model.zero_grad()
    model(torch.linspace(-1, 1, 4 * rows).view(rows, 4)).square().sum().backward()
    return model.get_parameter("lin.weight").grad.clone()


def test_a_name_that_modules_have_too_is_compared_whole(captured: list[object]) -> None:
    model, plain = planned(of_a_common_name), Net(of_a_common_name)
    for n in (2, 2, 3, 2):
        ours = gradient(model, n)
        assert torch.equal(ours, gradient(plain, n))
    assert len(captured) == 4


def planned(rule: Callable[..., Any]) -> nn.Module:
    return rematplan.apply(Net(rule), **{**SETTINGS, "budget": "1MiB"})


def dictionary(model: Any) -> dict[Any, Any]:
    return TABLE if model.rule is a_global else model.of_class if model.rule is of_a_class else model.d


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gets an entry for each capture."""
    made: list[object] = []
    capture = Captures._captured

    def counted(*given: Any) -> Any:
        made.append(given)
        return capture(*given)

    monkeypatch.setattr(Captures, "_captured", counted)
    TABLE.clear()
    Net.of_class.clear()
    return made


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_table_is_captured_without_and_with_each_entry(
    rule: Callable[..., Any], captured: list[object]
) -> None:
    lengths = [2, 2, 3, 3, 4, 4, 2, 3, 4, 2]
    expected = [gradient(plain, n) for plain in [Net(rule)] for n in lengths]
    TABLE.clear()
    Net.of_class.clear()
    model = planned(rule)
    assert all(map(torch.equal, expected, [gradient(model, n) for n in lengths]))
    assert len(captured) == 2 * 3


def test_an_entry_that_is_replaced_or_deleted_outside_is_seen(captured: list[object]) -> None:
    model, plain = planned(a_number), Net(a_number)
    for n, key, value in [(2, 9, 1.0), (2, 9, 2.0), (2, 2, 7.0), (2, 2, ABSENT), (3, 2, 8.0), (2, 3, 0.0)]:
        for one in (model, plain):
            one.d.pop(key, None) if value is ABSENT else one.d.update({key: value})
        assert torch.equal(gradient(model, n), gradient(plain, n))
        assert model.d == plain.d
    assert len(captured) == 5  # with 2: absent, 0.5, 7.0, and 8.0; 3 absent


def a_variable_that_is_passed_on(s: Any, x: Tensor) -> Any:
    known = s.d
    if x.shape[0] not in known:
        known[x.shape[0]] = 2.0
    return len(known) + known[x.shape[0]]


def a_variable_of_the_last_round(s: Any, x: Tensor) -> Any:
    total, known = 0.0, {}
    for _ in range(2):
        total += len(known)
        known = s.d
        if x.shape[0] not in known:
            known[x.shape[0]] = 2.0
    return total


@pytest.mark.parametrize("rule", [a_variable_that_is_passed_on, a_variable_of_the_last_round])
def test_a_variable_that_is_used_in_another_way_is_compared_whole(
    rule: Callable[..., Any], captured: list[object]
) -> None:
    model, plain = planned(rule), Net(rule)
    for n in (2, 2, 3, 2):
        assert torch.equal(gradient(model, n), gradient(plain, n))
    assert len(captured) == 4


def test_many_lengths_are_planned_whole(captured: list[object]) -> None:
    model = planned(a_number)
    for n in range(2, 2 + MANY):
        gradient(model, n)
        gradient(model, n)
    assert rematplan.planning(model).plan.budget == 1 << 20
    assert len(captured) == 2 * MANY


def entries() -> float:
    return float(len(TABLE))


def counted_elsewhere(s: Any, x: Tensor) -> Any:
    return a_global(s, x) + globals()["ent" + "ries"]()


def test_code_that_is_not_examined_sees_the_whole_dictionary(captured: list[object]) -> None:
    model, plain = planned(counted_elsewhere), Net(counted_elsewhere)
    for entry in (7, 8, 8):
        TABLE[entry] = 1.0
        ours = gradient(model, 2)
        assert torch.equal(ours, gradient(plain, 2))
    assert len(captured) == 2


def a_count(s: Any, _: Tensor) -> float:
    s.d["n"] = 1.0 - s.d.get("n", 0.0)
    return 1.0 + s.d["n"]


def features(s: Any, x: Tensor) -> Tensor:
    s.d["x"] = x.mean()
    s.d["y"] = s.d["x"] + 1
    return s.d["y"]


def lists(s: Any, x: Tensor) -> float:
    s.lists[x.shape[0]].append(1.0)
    return float(len(s.lists[x.shape[0]]))


def test_items_that_are_stored_before_they_are_read_are_not_guarded(captured: list[object]) -> None:
    model, plain = planned(features), Net(features)
    for n in (2, 2, 3, 3, 2):
        assert torch.equal(gradient(model, n), gradient(plain, n))
        assert repr(model.d) == repr(plain.d)
    assert rematplan.planning(model).plan
    assert len(captured) == 2  # the second has open sizes


@pytest.mark.parametrize("rule", [a_count, lists], ids=lambda rule: rule.__name__)
@pytest.mark.filterwarnings("ignore")
def test_what_is_changed_in_each_call_is_followed(rule: Callable[..., Any]) -> None:
    model, plain = planned(rule), Net(rule)
    for n in (2, 2, 3, 2, 3):
        assert torch.equal(gradient(model, n), gradient(plain, n))
        assert repr((model.d, model.lists)) == repr((plain.d, plain.lists))


class Program(Net):
    """Does to its dictionary what a list of names and keys says; 0 stands for the number of rows."""

    def __init__(self, program: list[tuple[str, int]]) -> None:
        super().__init__(a_number)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        factor: Any = 1.0
        for what, key in self.program:
            k = key or x.shape[0]
            if what == "in":
                factor += 1.0 if k in self.d else 0.5
            elif what == "get":
                factor += self.d.get(k, 0.25)
            elif what == "set":
                self.d[k] = float(x.shape[0])
            elif what == "same":
                self.d[k] = 1.0
            elif what == "default":
                factor += self.d.setdefault(k, 2.0)
            elif what == "length":
                factor += len(self.d)
            elif what == "tensor":
                if k not in self.d:
                    self.d[k] = torch.ones(()) * x.shape[0]
                factor = factor + self.d[k]
            else:
                self.d.pop(k, None)
        return self.lin(x) * factor


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore")
def test_drawn_programs_have_the_bits_of_eager_mode(seed: int) -> None:
    draw = random.Random(seed)
    names = ["in", "get", "set", "same", "default", "tensor", *["length", "pop"] * (seed % 3 == 0)]
    program = [(draw.choice(names), draw.choice([2, 3, 0, 0])) for _ in range(draw.randint(1, 4))]
    plain, model = Program(program), rematplan.apply(Program(program), **{**SETTINGS, "budget": "1MiB"})
    for _ in range(6):
        n, key, change = draw.choice([2, 3]), draw.choice([2, 3]), draw.choice(["", "", "", "delete", "put"])
        for one in (plain, model):
            if change == "delete":
                one.d.pop(key, None)
            elif change:
                one.d[key] = 3.0
        assert torch.equal(gradient(model, n), gradient(plain, n)), (program, n, key, change)
        assert [*model.d.items()] == [*plain.d.items()]
