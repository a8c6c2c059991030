"""Laws of Python state that a forward reads and changes: a planned loop has eager mode's bits and state, call by call,
or the model runs in eager mode, or is refused, with one line that says why."""

import copy
import random
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from same_bits import SETTINGS, X
from torch import Tensor, nn

import rematplan


class Mode(Enum):
    WARM = 1
    HOT = 2


@dataclass
class Settings:
    calls: int = 0
    scale: float = 1.0


@dataclass(frozen=True)
class Frozen:
    calls: int = 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Callable_:
    """A helper that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 2.0 if self.calls % 3 == 0 else 1.0


Pair = namedtuple("Pair", "first second")
CALLS = 0
SEEN: list[int] = []
LAST: Any = None
TABLE: dict[Any, Any] = {}


class Net(nn.Module):
    """Scales by what ``rule`` makes of the state."""

    calls_of_class = default_of_class = 0

    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.lin, self.rule = nn.Linear(16, 16), rule
        self.first, self.step, self.tau, self.shape = True, 0, 1.0, None
        self.many, self.table, self.items, self.names = (0,), {}, [], set()
        self.mode, self.frozen, self.slotted, self.helper = Mode.WARM, Frozen(), Slotted(), Callable_()
        self.helpers, self.recent, self.pair = [Settings()], deque(maxlen=2), Pair(0, 1)
        self.ordered = OrderedDict()
        self.bytes, self.array = bytearray(2), np.zeros(2)
        self.random, self.numbers = random.Random(3), np.random.default_rng(3)
        self.parts = nn.ModuleDict({"inner": nn.ModuleDict({"last": nn.Identity()})})
        self.parts["inner"]["last"].hits = 0
        self.cached: Any = None
        self.last: Any = None
        self._hidden = 0

    @property
    def hidden(self) -> int:
        self._hidden += 1
        return self._hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.rule(self, x)


def first_call(s: Any, _: Tensor) -> float:
    first, s.first = s.first, False
    return 3.0 if first else 1.0


def shape(s: Any, x: Tensor) -> float:
    new = s.shape != x.shape
    s.shape = x.shape
    return 3.0 if new else 1.0


def threshold(s: Any, _: Tensor) -> float:
    if s.step < 3:
        s.step += 1
        return 2.0
    return 1.0


def counted_only(s: Any, x: Tensor) -> float:
    s.step += x.shape[0]
    s.tau = s.tau * 0.5
    return 1.0


def cycling(s: Any, _: Tensor) -> float:
    s.step = (s.step + 1) % 3
    return [1.0, 2.0, 3.0][s.step]


def mode(s: Any, _: Tensor) -> float:
    before, s.mode = s.mode, Mode.HOT
    return 2.0 if before is Mode.WARM else 1.0


def slotted(s: Any, _: Tensor) -> float:
    s.slotted.calls += 1
    return 2.0 if s.slotted.calls % 2 else 1.0


def called(s: Any, _: Tensor) -> float:
    return s.helper()


def in_a_list(s: Any, _: Tensor) -> float:
    s.helpers[0].calls += 1
    return 2.0 if s.helpers[0].calls % 2 else 1.0


def of_a_class(_s: Any, _: Tensor) -> float:
    Net.calls_of_class += 1
    return 2.0 if Net.calls_of_class % 2 else 1.0


def inherited(s: Any, _: Tensor) -> float:
    s.default_of_class += 1
    return 2.0 if s.default_of_class % 2 else 1.0


def a_global(_s: Any, _: Tensor) -> float:
    global CALLS
    CALLS += 1
    return 2.0 if CALLS % 2 else 1.0


def a_list_of_shapes(_s: Any, x: Tensor) -> float:
    SEEN.append(x.shape[0])
    return 1.0


def of_a_function(_s: Any, _: Tensor) -> float:
    of_a_function.calls += 1
    return 2.0 if of_a_function.calls % 2 else 1.0


of_a_function.calls = 0


def property_(s: Any, _: Tensor) -> float:
    return 2.0 if s.hidden > 2 else 1.0


def nested_modules(s: Any, _: Tensor) -> float:
    last = s.parts["inner"]["last"]
    last.hits += 1
    return 2.0 if last.hits > 2 else 1.0


def cached(s: Any, x: Tensor) -> Any:
    if s.cached is None or s.cached.shape[0] != len(x):
        s.cached = torch.linspace(0.5, 1, len(x))
    return s.cached[:, None]


def a_global_table(_s: Any, x: Tensor) -> Any:
    if len(x) not in TABLE:
        TABLE[len(x)] = torch.linspace(0.5, 1, len(x))
    return TABLE[len(x)][:, None]


def default(s: Any, _: Tensor) -> float:
    s.made = getattr(s, "made", 0) + 1
    return 1.0


def deleted(s: Any, _: Tensor) -> float:
    if hasattr(s, "first"):
        del s.first
        return 2.0
    return 1.0


def a_set(s: Any, x: Tensor) -> float:
    new = len(x) not in s.names
    s.names.add(len(x))
    return 2.0 if new else 1.0


def a_deque(s: Any, x: Tensor) -> float:
    s.recent.append(len(x))
    return float(len(s.recent))


def a_buffer_of_another_shape(s: Any, x: Tensor) -> Any:
    if not hasattr(s, "index") or s.index.shape[0] != len(x):
        s.register_buffer("index", torch.arange(1.0, 1 + len(x)), persistent=False)
    return s.index[:, None]


def closing() -> Callable[..., float]:
    calls = 0

    def rule(_s: Any, _: Tensor) -> float:
        nonlocal calls
        calls += 1
        return 2.0 if calls % 2 else 1.0

    return rule


def an_argument(s: Any, _: Tensor, seen: dict[str, int] = {"n": 0}) -> float:  # noqa: B006
    seen["n"] = 1 - seen["n"]
    return 1.0 + seen["n"]


def an_array(s: Any, _: Tensor) -> float:
    s.array[0] = 1 - s.array[0]
    return float(1 + s.array[0])


def some_bytes(s: Any, _: Tensor) -> float:
    s.bytes[0] = (s.bytes[0] + 1) % 3
    return float(1 + s.bytes[0])


def filled(s: Any, x: Tensor) -> float:
    factor = 2.0 if s.last is None else 1.0
    s.last = x.detach().mean()
    return factor


def emptied(s: Any, x: Tensor) -> float:
    if s.last is not None:
        s.last = None
        return 2.0
    s.last = x.detach().mean()
    return 1.0


def shown_after_a_test(s: Any, x: Tensor) -> Any:
    factor = 1.0 if s.last is None else s.__dict__["last"]
    s.last = x.detach().mean()
    return factor


def read_after_a_test(s: Any, x: Tensor) -> Any:
    factor = 1.0 if s.last is None else s.last
    s.last = x.detach().mean()
    return factor


FOLLOWED = (
    shown_after_a_test,
    read_after_a_test,
    filled,
    emptied,
    first_call,
    shape,
    threshold,
    counted_only,
    cycling,
    mode,
    slotted,
    called,
    in_a_list,
    of_a_class,
    inherited,
    a_global,
    a_list_of_shapes,
    of_a_function,
    nested_modules,
    cached,
    a_global_table,
    deleted,
    a_set,
    a_deque,
    a_buffer_of_another_shape,
    closing,
    an_argument,
    an_array,
    some_bytes,
)


OF_A_SHAPE = (
    *(shape, counted_only, a_list_of_shapes, cached, a_global_table, a_set, a_deque),
    a_buffer_of_another_shape,
)
"""Those that are also called with another number of rows."""


def outside() -> tuple[Any, ...]:
    return copy.deepcopy(
        (CALLS, SEEN, TABLE, Net.calls_of_class, vars(of_a_function), an_argument.__defaults__)
    )


def reset() -> None:
    global CALLS
    CALLS, Net.calls_of_class, of_a_function.calls = 0, 0, 0
    SEEN.clear()
    TABLE.clear()
    an_argument.__defaults__[0]["n"] = 0


def state_of(model: nn.Module) -> str:
    names = (
        "first step tau shape many table items names mode frozen helpers recent pair ordered "
        "bytes array _hidden made index cached default_of_class last"
    )
    held = {name: getattr(model, name, "absent") for name in names.split()}
    return repr((held, model.slotted.calls, model.helper.calls, model.parts["inner"]["last"].hits))


@pytest.mark.parametrize("rule", FOLLOWED, ids=lambda rule: rule.__name__)
def test_state_that_a_forward_reads_and_changes_is_followed(rule: Callable[..., Any]) -> None:
    def new() -> nn.Module:
        reset()
        torch.manual_seed(0)
        return Net(closing() if rule is closing else rule)

    def use(model: nn.Module) -> list[Tensor]:
        given = []
        for x in (X, X, X[:3], X, X) if rule in OF_A_SHAPE else [X] * 5:
            model.zero_grad()
            y = model(x)
            y.square().sum().backward()
            given += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            given += [buffer.clone() for buffer in model.buffers()]
        return given

    plain = new()
    torch.manual_seed(5)
    expected, left = use(plain), (state_of(plain), repr(outside()), torch.get_rng_state())
    model = new()
    before = state_of(model), repr(outside())
    planned = rematplan.plan_module(model, (X,), **SETTINGS)
    assert (state_of(planned), repr(outside())) == before
    torch.manual_seed(5)
    assert all(map(torch.equal, use(planned), expected))
    assert (state_of(planned), repr(outside())) == left[:2]
    assert torch.equal(torch.get_rng_state(), left[2])


def growing_tuple(s: Any, _: Tensor) -> float:
    s.many = (s.many[0] + 1,)
    return 3.0 if s.many[0] < 3 else 1.0


def growing_table(s: Any, _: Tensor) -> float:
    s.table["n"] = s.table.get("n", 0) + 1
    return 3.0 if s.table["n"] < 2 else 1.0


def annealed(s: Any, _: Tensor) -> float:
    s.tau = s.tau * 0.9
    return s.tau


def a_frozen_one(s: Any, _: Tensor) -> float:
    s.frozen = replace(s.frozen, calls=s.frozen.calls + 1)
    return 1.0 + s.frozen.calls


def a_pair(s: Any, _: Tensor) -> float:
    s.pair = s.pair._replace(first=s.pair.first + 1)
    return 1.0 + s.pair.first


def ordered(s: Any, _: Tensor) -> float:
    s.ordered[len(s.ordered)] = 0
    return float(len(s.ordered))


def popped(s: Any, _: Tensor) -> float:
    s.items = s.items or list(range(20))
    return float(s.items.pop())


def drawn(s: Any, _: Tensor) -> float:
    return s.random.random()


def drawn_by_numpy(s: Any, _: Tensor) -> float:
    return float(s.numbers.random())


def kept_activations(s: Any, x: Tensor) -> Any:
    s.items.append(x.detach().mean())
    return torch.stack(s.items).mean()


def counted_and_shown(s: Any, _: Tensor) -> float:
    s.step += 1
    return float(vars(s)["step"])


WITHOUT_PLAN = (
    counted_and_shown,
    property_,
    default,
    growing_tuple,
    growing_table,
    annealed,
    a_frozen_one,
    a_pair,
    ordered,
    popped,
    drawn,
    drawn_by_numpy,
    kept_activations,
)


@pytest.mark.parametrize("rule", WITHOUT_PLAN, ids=lambda rule: rule.__name__)
def test_state_that_makes_another_graph_in_each_call_leaves_the_model_in_eager_mode(
    rule: Callable[..., Any],
) -> None:
    model = Net(rule)
    before = state_of(model), model.random.getstate()
    with pytest.warns(UserWarning, match="no part of it can be planned") as told:
        rematplan.plan_module(model, (X,), **SETTINGS)
    assert len(str(told[0].message).splitlines()) == 1
    assert (state_of(model), model.random.getstate()) == before
