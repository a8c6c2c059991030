"""Laws of models planned in parts: their state is as it was, whatever they read, change or replace."""

import copy
import itertools
import pickle
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from parts_models import (
    WIDTH,
    Base,
    Block,
    Dropping,
    Matching,
    as_a_planned_module,
    batch,
    in_parts,
    made,
    planned,
    run,
    same_steps,
    seeded,
)
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import ModelError
from rematplan.parts.rehearsal import Rehearsal
from rematplan.runtime.graph.compat import pytree

pytestmark = pytest.mark.usefixtures("few_searches")


def test_a_planned_module_makes_its_plans_at_once_and_leaves_the_model_as_it_was() -> None:
    model, plain = made(Matching)
    state = torch.get_rng_state()
    found = as_a_planned_module(model, "85%")
    assert torch.equal(state, torch.get_rng_state())
    assert rematplan.planning(found).plans == ()  # a part is compiled when it is called
    assert planned(found).share > 0.5
    assert isinstance(found, Matching)
    assert all(p.grad is None for p in model.parameters())
    for one in (model, plain):  # both in eager mode
        seeded(0)
        run(one, *batch(0))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Replacing(Base):
    """Replaces a module in its first call, and remembers that."""

    ready = False

    def body(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.blocks[1].drop, self.ready = nn.Dropout(0.5), True
        return super().body(x)


def test_a_forward_that_replaces_a_module_is_planned_in_parts() -> None:
    model, plain = made(Replacing)
    same_steps(in_parts(model, "1MiB"), plain, 3)


SHARED = {"calls": 0}


class Stateful(Base):
    """Changes state of each kind in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.numbers = random.Random(0), np.random.default_rng(0)
        self.draws = torch.Generator().manual_seed(0)
        self.mean, self.calls, self.kept = torch.zeros(WIDTH), 0, []
        self.shadow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        self.calls += 1
        SHARED["calls"] += 1
        self.kept.append(SHARED["calls"])
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
            self.shadow.weight.data = self.shadow.weight.data * 0.9 + 0.01
            self.shadow.bias.mul_(0.9).add_(0.01)
        noise = torch.rand(WIDTH, generator=self.draws) + self.own.random() + self.numbers.random()
        return super().body(x + self.shadow(self.mean + noise) * self.calls * len(self.kept))


@pytest.mark.parametrize("plan", [in_parts, as_a_planned_module])
def test_planning_in_parts_leaves_all_state_as_it_was(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = made(Stateful)
    model = plan(model, "2MiB")
    for one, calls in ((model, {"calls": 0}), (plain, {"calls": 0})):
        monkeypatch.setitem(globals(), "SHARED", calls)
        for at in range(3):
            seeded(at)
            run(one, *batch(at))
    assert (model.calls, model.kept) == (plain.calls, plain.kept) == (3, [1, 2, 3])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)


class Cycling(Base):
    """Reads an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 2.0])

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * next(self.scales))


def test_a_forward_that_reads_an_iterator_is_refused_and_leaves_it() -> None:
    model = Cycling()
    with pytest.raises(ModelError, match="reads scales, a cycle"):
        as_a_planned_module(model, "2MiB")
    assert next(model.scales) == 1.0


class Cache:
    """What layers have computed, as a list in an object."""

    def __init__(self) -> None:
        self.entries: list[Tensor] = []


class CachingBlock(Block):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        made = super().forward(x)
        if cache is not None:
            cache.entries.append(made)
        return made


class Caching(Base):
    """Blocks that leave what they compute in an object that they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachingBlock() for _ in range(2))
        self.tail = nn.ModuleList(CachingBlock() for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cache, few = Cache(), np.random.uniform() < 0.5
        for block in [*self.tail, *self.blocks[: 1 if few else 2]]:
            x = block(x, cache if block in self.blocks else None)
        return functional.cross_entropy(self.head(x + sum(cache.entries)), labels)


def test_a_module_that_changes_an_object_is_no_part() -> None:
    model, plain = made(Caching)
    in_parts(model, "2MiB")
    same_steps(model, plain, 4)
    names = {name for name, _ in planned(model).rehearsed.calls}
    assert {"tail.0", "tail.1"} <= names
    assert not {name for name in names if name.startswith("blocks") and name.count(".") < 2}
    text = planned(model).text()
    assert "; not planned: blocks.0 (the forward changes an object that it is called with, a Cache" in text
    assert "use_cache=False" in text


def test_a_model_that_changes_an_object_has_no_plan_and_leaves_it_as_it_was() -> None:
    block, cache = CachingBlock(), Cache()
    with pytest.warns(UserWarning, match="changes an object that it is called with, a Cache"):
        rematplan.plan_module(block, (torch.randn(4, WIDTH), cache), budget="1MiB", costs="roofline")
    assert cache.entries == []


def test_modules_may_be_exchanged_between_steps() -> None:
    model, plain = made(Matching)
    in_parts(model, "2MiB")
    same_steps(model, plain, 2)
    torch.manual_seed(1)
    fresh, other = Block(), nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
    for changed in (fresh, other, None):
        for one in (model, plain):
            if changed is None:
                one.blocks = nn.ModuleList([one.blocks[2], one.blocks[0]])
            else:
                one.blocks[1] = copy.deepcopy(changed)
        same_steps(model, plain, 1)
        assert len(rematplan.planning(model).plans) >= len(model.blocks)
    for one in (model, plain):
        one.blocks.append(copy.deepcopy(fresh))
    same_steps(model, plain, 1)
    for one in (model, plain):
        del one.blocks[2]
    same_steps(model, plain, 1)
    named, _ = made(Base)
    in_parts(named, "2MiB", modules="blocks.2")
    run(named, *batch(0))
    del named.blocks[2]
    with pytest.raises(ModelError, match=r"has no module blocks\.2 any longer"):
        run(named, *batch(0))


def test_evaluation_copies_and_removal() -> None:
    model, plain = made(Dropping)
    in_parts(model, "90%")
    run(model, *batch(0))
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        fresh = copy.deepcopy(plain)
        one.zero_grad()
        same_steps(one, fresh, 2)
    with torch.no_grad():
        seeded(1)
        found = model(*batch(1))
        seeded(1)
        assert torch.equal(found, plain(*batch(1)))
    rematplan.remove(model)
    assert all("forward" not in vars(part) for part in model.modules())


class Carrying(Base):
    """Blocks of which each call adds its result to an object, and reads what earlier calls have added."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.entries.append(self.body(x + sum(cache.entries)).tanh())
        loss: Tensor = self.head(cache.entries[-1]).square().mean()
        return loss


def test_a_call_may_continue_the_graph_of_an_earlier_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsals: list[Rehearsal] = []
    real = Rehearsal.run
    monkeypatch.setattr(Rehearsal, "run", lambda one, *of: (rehearsals.append(one), real(one, *of))[1])
    model, plain = made(Carrying)
    in_parts(model, "2MiB")
    counts = []
    for step in range(3):
        for one in (model, plain):
            seeded(step)
            one.zero_grad()
            cache = Cache()
            torch.stack([one(batch(at)[0], cache) for at in range(3)]).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        counts.append(len(rehearsals))
    # An object that is made for one step is no reason for another rehearsal.
    assert counts[0] > 0
    assert counts[1:] == [counts[0]] * 2


class Rounds:
    """An option object of a plain class."""

    def __init__(self, count: int) -> None:
        self.count = count


class Repeating(Base):
    """Computes more outside of its blocks if an option says so. It decides by values, so it is planned in parts."""

    def forward(self, x: Tensor, rounds: Rounds) -> Tensor:
        h = self.body(x)
        if h.sum().item() > -1e9:
            for _ in range(rounds.count):
                h = h.sin()
        loss: Tensor = self.head(h).square().mean()
        return loss


def test_option_objects_with_other_attributes_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsals: list[Rehearsal] = []
    real = Rehearsal.run
    monkeypatch.setattr(Rehearsal, "run", lambda one, *of: (rehearsals.append(one), real(one, *of))[1])
    model, _ = made(Repeating)
    in_parts(model, "64MiB")
    counts, peaks = [], []
    for count in (1, 1, 40, 40, 1):
        model(batch(0)[0], Rounds(count)).backward()
        model.zero_grad()
        counts.append(len(rehearsals))
        peaks.append(planned(model).peak)
    assert counts[0] == counts[1] < counts[2] == counts[3] == counts[4]
    assert peaks[0] == peaks[1] == peaks[4] < peaks[2] == peaks[3]


class Registered:
    """A class that its user has registered with PyTorch's pytrees."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls


pytree.register_pytree_node(Registered, lambda one: ([], one.calls), lambda _leaves, calls: Registered(calls))


def counted(kept: Any, at: Any = 0) -> int:
    kept[at] += 1
    return int(kept[at])


def appended(kept: Any) -> int:
    kept.append(1)
    return len(kept)


def added(kept: set[int]) -> int:
    kept.add(len(kept))
    return len(kept)


def called(kept: Any) -> int:
    kept.calls += 1
    return int(kept.calls)


class Changing(Base):
    """Changes an argument, and computes with the number that it finds there. ``drops``: whether NumPy also draws."""

    def __init__(self, change: Callable[[Any], int], drops: bool) -> None:
        super().__init__()
        self.change, self.drops = change, drops

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        if self.drops and np.random.uniform() < 0.3:
            x = self.blocks[0](x)
        return self.head(self.body(x)).square().mean() * self.change(kept)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (Counter(a=0), partial(counted, at="a")),
        (np.zeros(2), counted),
        (array("l", [0]), counted),
        (deque[int](), appended),
        (set[int](), added),
        (Registered(), called),
    ],
    ids=lambda of: type(of).__name__ if not callable(of) else "",
)
def test_an_argument_that_the_forward_changes_is_changed_once(
    kept: Any, change: Callable[[Any], int], drops: bool
) -> None:
    model, plain = made(partial(Changing, change, drops))
    in_parts(model, "2MiB")
    for step in range(3):
        given = [copy.deepcopy(kept), copy.deepcopy(kept)]
        losses = []
        for one, own in zip((model, plain), given, strict=True):
            seeded(step)
            losses.append(one(batch(step)[0], own))
        assert torch.equal(*losses)
        found, wanted = (str(vars(one) if change is called else one) for one in given)
        assert found == wanted


class Noisy(Base):
    """Adds noise of a generator that it is called with."""

    def forward(self, x: Tensor, generators: list[torch.Generator]) -> Tensor:
        noise = torch.randn(x.shape, generator=generators[0])
        loss: Tensor = self.head(self.body(x) + noise).square().mean()
        return loss


def test_a_generator_among_the_arguments_draws_once() -> None:
    model, plain = made(Noisy)
    in_parts(model, "2MiB")
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    for step in range(2):
        losses = []
        for one, generator in zip((model, plain), generators, strict=True):
            seeded(step)
            losses.append(one(batch(step)[0], [generator]))
        assert torch.equal(*losses)
        assert torch.equal(*(generator.get_state() for generator in generators))
