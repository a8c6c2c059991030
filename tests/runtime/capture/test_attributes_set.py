"""What a forward sets in its modules is set by a planned one where it is only given, and is not left by planning."""

import copy
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from same_bits import SETTINGS, X, equal_after, planned_and_plain
from torch import Tensor, nn

import rematplan


class Recording(nn.Module):
    """Hangs hooks on its parts when it first runs, to give what they give beside its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.hooked = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.hooked:
            for part in self.body:
                part.register_forward_hook(lambda _m, _a, y: self.record.append(y))
            self.hooked = True
        self.record: list[Tensor] = []
        self.body(x)
        return tuple(self.record)


@pytest.mark.filterwarnings("ignore:.*has hooks on:UserWarning")
def test_hooks_that_a_forward_installs_are_not_left_by_planning() -> None:
    torch.manual_seed(0)
    model = Recording()
    planned, plain = planned_and_plain(model)
    assert not model.body[0]._forward_hooks
    for _ in range(3):
        equal_after(lambda m: m(X)[1].sum().backward(), planned, plain)
    assert len(planned(X)) == 3
    assert len(planned.body[0]._forward_hooks) == 1
    assert len(planned.plans) == 2


class Balanced(nn.Linear):
    """Leaves a part of the loss, and what it was made of, in attributes, of which it read none before."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.loss: Any = 0.0
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        self.loss = 0.0
        self.seen = []
        y = super().forward(x).tanh()
        for half in y.chunk(2, -1):
            self.loss = self.loss + half.mean().square()
            self.seen.append((half.detach(), half.shape))
        self._output = y
        return y, y.shape


def test_attributes_that_a_forward_sets_are_set() -> None:
    planned, plain = planned_and_plain(nn.Sequential(nn.Linear(16, 16), Balanced()))
    assert planned[1].loss == 0.0

    def use(model: nn.Module) -> list[Tensor]:
        seen = []
        for x in (X, X[:4], X):
            y, shape = model(x)
            (y.pow(2).sum() + model[1].loss).backward()
            assert model[1]._output is y
            assert type(shape) is torch.Size
            assert type(model[1].seen[0][1]) is torch.Size
            seen += [y.detach(), model[1].loss.detach(), model[1].seen[1][0]]
        return seen

    equal_after(use, planned, plain)
    assert len(planned.plans) == 2


class Record:
    """Has what a forward leaves."""

    def __init__(self) -> None:
        self.x: Any = None
        self.seen: list[Tensor] = []


class Recorded(nn.Linear):
    def __init__(self, record: Any) -> None:
        super().__init__(16, 16)
        self.record = record

    def forward(self, x: Tensor) -> Tensor:
        self.record.x = super().forward(x)
        self.record.seen.append(self.record.x)
        return self.record.x.tanh()


def test_records_are_as_before_planning_and_filled_by_calls() -> None:
    planned, plain = planned_and_plain(Recorded(Record()))
    assert vars(planned.record) == {"x": None, "seen": []}

    def use(model: nn.Module) -> list[Tensor]:
        for _ in range(3):
            (model(X).sum() + model.record.seen[-1].square().sum()).backward()
        return [t.detach() for t in (model.record.x, *model.record.seen)]

    equal_after(use, planned, plain)
    assert len(planned.plans) == 1


def test_records_whose_accesses_are_not_seen_have_no_plan_if_they_are_filled() -> None:
    with pytest.warns(UserWarning, match=r"changes record\.x and computes with it"):
        rematplan.plan_module(Recorded(SimpleNamespace(x=None, seen=[])), (X,), **SETTINGS)


def test_containers_are_as_before_planning_and_filled_by_calls() -> None:
    class Logging(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.log["y"] = y
            self.recent.append(y)
            self.kinds.add(y.dtype)
            self.shapes.update(last=y.shape)
            return y

    model = Logging(16, 16)
    model.log, model.recent, model.kinds, model.shapes = OrderedDict(), deque(), set(), defaultdict(list)
    planned, plain = planned_and_plain(model)
    assert (planned.log, planned.recent, planned.kinds, planned.shapes) == ({}, deque(), set(), {})
    logs = planned.log, planned.recent

    def use(model: nn.Module) -> list[Tensor]:
        for x in (X, X, X[:3]):
            (model(x).sum() + model.log["y"].square().sum()).backward()
        return [t.detach() for t in (*model.log.values(), *model.recent)]

    equal_after(use, planned, plain)
    assert logs == (planned.log, planned.recent)
    assert logs[1] is planned.recent
    assert (planned.kinds, planned.shapes) == (plain.kinds, plain.shapes)
    assert len(planned.plans) == 2


def test_a_container_in_a_container_that_is_filled_has_no_plan() -> None:
    class Nested(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.log["seen"].append(y)
            return y

    model = Nested(16, 16)
    model.log = {"seen": []}
    with pytest.warns(UserWarning, match="changes log and computes with it"):
        rematplan.plan_module(model, (X,), **SETTINGS)
    assert model.log == {"seen": []}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weights_that_a_forward_lists_are_the_model_s_parameters(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    planned, plain = planned_and_plain(kind(16, 16, batch_first=True))
    x = torch.randn(2, 5, 16)
    for model in (planned, plain):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model(x)[0].square().sum().backward()
        optimizer.step()
    assert all(a is b for a, b in zip(planned._flat_weights, planned.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(planned(x)[0], plain(x)[0])


class Forces(nn.Linear):
    """Differentiates its result by its argument, for which it sets ``requires_grad``."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        energy = super().forward(x).square().sum()
        return energy + torch.autograd.grad(energy, x, create_graph=True)[0].square().sum()


def test_a_warning_says_that_requires_grad_of_an_argument_is_not_set() -> None:
    torch.manual_seed(0)
    plain, x = Forces(4, 4), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="sets requires_grad of argument 0, which a planned one does not"):
        planned = rematplan.plan_module(copy.deepcopy(plain), (x.clone(),), budget="1MiB", costs="roofline")
    for before in (False, True):
        found = []
        for model in (planned, plain):
            model.zero_grad()
            given = x.clone().requires_grad_(before)
            model(given).backward()
            found.append([*(p.grad for p in model.parameters()), *([given.grad] if before else [])])
        assert all(map(torch.equal, *found))
