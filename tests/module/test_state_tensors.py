"""Laws of forwards that keep tensors for their next call, as recurrent and spiking networks do: each call has the bits
of eager mode, and a step is captured once."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.module.forward_capture import Tracing
from rematplan.module.verification import same_bits

X = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(0))


class OneState(nn.GRUCell):
    """Keeps one tensor, made by its first call."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x, self.h)
        self.h = h.detach()
        return h


class Absent(nn.GRUCell):
    """Its first call makes the attribute. It is not detached, so the loss of several calls goes through it."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "h"):
            self.h = torch.zeros(len(x), 16)
        self.h = super().forward(x, self.h)
        return self.h


class Several(nn.LSTM):
    """Keeps a tuple, drops out and counts."""

    def __init__(self) -> None:
        super().__init__(16, 16, 2, dropout=0.2)
        self.h: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y, h = super().forward(x[None], self.h)
        self.h = tuple(one.detach() for one in h)
        self.calls += 1
        return y.tanh() if self.calls % 2 else y


class Listed(nn.Module):
    """Replaces a list in an object that it has, and has a module with a state, which the caller resets."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(16, 16) for _ in range(2))
        self.inner, self.kept = OneState(), Kept()

    def forward(self, x: Tensor) -> Tensor:
        new = []
        for cell, h in zip(self.cells, self.kept.states, strict=True):
            x = cell(x, h)
            new.append(x.detach())
        self.kept.states = new
        return self.inner(x)


class Kept:
    def __init__(self) -> None:
        self.states: list[Tensor | None] = [None, None]


def detach(model: nn.Module, call: int) -> None:
    if isinstance(model, Absent) and call % 3 == 2:
        model.h = model.h.detach()


def reset(model: nn.Module, call: int) -> None:
    if isinstance(model, Listed) and call == 3:
        model.inner.h = torch.ones(8, 16)


def states_of(model: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(model, Listed):
        return (*model.kept.states, model.inner.h)
    return model.h if isinstance(model, Several) else (model.h,)


@pytest.mark.filterwarnings("ignore:.*is called again before the backward:UserWarning")
@pytest.mark.parametrize(
    ("make", "every", "plans"), [(OneState, 1, 2), (Absent, 3, 3), (Several, 1, 3), (Listed, 1, 2)]
)
def test_calls_have_the_bits_of_eager_mode(make: Callable[[], nn.Module], every: int, plans: int) -> None:
    torch.manual_seed(0)
    plain = make()
    planned = rematplan.apply(copy.deepcopy(plain), "200%", costs="roofline", refine=False)
    found = []
    for model in (plain, planned):
        torch.manual_seed(1)
        left = []
        for call in range(0, len(X), every):
            model.zero_grad()
            reset(model, call)
            sum(model(x).square().mean() for x in X[call : call + every]).backward()
            detach(model, call + every - 1)
            left += [p.grad for p in model.parameters()]
        found.append([*left, *states_of(model), torch.get_rng_state()])
    assert all(map(same_bits, *found))
    assert len(rematplan.planning(planned).plans) == plans


def test_a_submodule_with_a_state_may_be_removed() -> None:
    planned = rematplan.apply(
        nn.Sequential(nn.Linear(16, 16), OneState()), "200%", costs="roofline", refine=False
    )
    for _ in range(2):
        planned(X[0]).sum().backward()
    del planned[1]
    planned(X[0]).sum().backward()
    assert len(rematplan.planning(planned).plans) == 3


def test_a_state_that_grows_in_each_call_has_no_plan() -> None:
    class Growing(nn.Linear):
        seen: tuple[Tensor, ...]

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) + sum(self.seen)
            self.seen = (*self.seen, y.detach())
            return y

    model = Growing(16, 16)
    model.seen = ()
    with pytest.warns(UserWarning, match="changes seen and computes with it"):
        rematplan.plan_module(model, (X[0],), budget="200%", costs="roofline")


def test_a_state_whose_accesses_are_not_seen_has_no_plan() -> None:
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept.h = super().forward(x) + self.kept.h
            return self.kept.h

    model = Hidden(16, 16)
    model.kept = SimpleNamespace(h=torch.zeros(8, 16))
    with pytest.warns(UserWarning, match=r"changes kept\.h and computes with it"):
        rematplan.plan_module(model, (X[0],), budget="200%", costs="roofline")


class Growing(nn.Linear):
    """Makes its table anew if a batch is longer than all before."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.table = torch.arange(x.shape[0])[:, None] / 9.0
        return super().forward(x + self.table[: x.shape[0]]).tanh()


class LastLength(Growing):
    """Makes its table anew if a batch has another length than the one before."""

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(x.shape[0])[:, None] / 9.0
        return nn.Linear.forward(self, x + self.table).tanh()


class Given(Growing):
    """Computes with a table that the training loop replaces."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.table is not None
        return nn.Linear.forward(self, x + self.table[: x.shape[0]]).tanh()


@pytest.mark.parametrize("kind", [Growing, LastLength, Given])
def test_tables_that_are_replaced_are_arguments(kind: type[Growing], monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[object] = []
    fixed = Tracing.fixed
    monkeypatch.setattr(Tracing, "fixed", lambda self: traced.append(self) or fixed(self))
    torch.manual_seed(0)
    plain = kind()
    model = rematplan.apply(copy.deepcopy(plain), "1MiB", strategy="approx_dp", costs="roofline")
    lengths = [4, 4, 6, 5, 6, 4, 7, 9, 8, 5, 9, 6, 4, 7, 8, 8, 9, 5, 4, 6]
    for at, length in enumerate(lengths):
        x, given = torch.randn(length, 16), torch.randn(9, 16)
        for one in (plain, model):
            one.zero_grad()
            one.table = given if kind is Given else one.table
            one(x).square().sum().backward()
        assert torch.equal(plain.weight.grad, model.weight.grad), (at, length)
        assert torch.equal(plain.table, model.table)
    assert len(traced) <= 10
    assert rematplan.planning(model).plans
