"""Laws of models that have another graph in each call: after a few captures they are planned in parts, if these fit the
budget; all steps have eager mode's bits."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from same_bits import SETTINGS
from torch import Tensor, nn
from torch.nn.utils import rnn

import rematplan
from rematplan.module import captures, shape_options
from rematplan.parts import whole_or_parts

MANY, MANY_SIZES = 3, 8
STEPS = MANY + 3
LOG: list[float] = []


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few captures are many."""
    for module in (captures, whole_or_parts):
        monkeypatch.setattr(module, "MANY", MANY)
    monkeypatch.setattr(captures, "MANY_SIZES", MANY_SIZES)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Base(nn.Module):
    """Two blocks with something between them that changes in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(block(), block()), nn.Sequential(block(), block())
        self.register_buffer("step", torch.zeros(1, dtype=torch.long))
        self.register_buffer("queue", torch.randn(16, 16 * STEPS))

    step: Tensor
    queue: Tensor


class WarmUp(Base):
    """A weight of the loss that grows with a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        weight = min(1.0, self.step.item() / 1000)
        self.step += 1
        h = self.first(x)
        return self.second(h).square().mean() + weight * h.square().mean()


class Queue(Base):
    """A place in a queue that advances, as in MoCo."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        at = int(self.step)
        scores = self.second(h) @ self.queue.clone()
        self.queue[:, at : at + len(x)] = h.detach()[:16].T
        self.step[0] = (at + 16) % self.queue.shape[1]
        return scores.square().mean()


class Argument(Base):
    """A number among the arguments."""

    def forward(self, x: Tensor, by: float) -> Tensor:
        return self.second(self.first(x) * by).square().mean()


class Inner(nn.Module):
    """Has its number inside of its only large module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Argument()

    def forward(self, x: Tensor, by: float) -> Tensor:
        return self.inner(x, by)


class Logging(Base):
    """Names a list that grows."""

    def forward(self, x: Tensor) -> Tensor:
        if x is None:
            LOG.clear()
        return self.second(self.first(x)).square().mean()


class NewKeys(Base):
    """Has another key for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[float, float] = {}

    def forward(self, x: Tensor, by: float) -> Tensor:
        if by not in self.known:
            self.known[by] = by / 2
        return self.second(self.first(x) * self.known[by]).square().mean()


def batch(at: int, rows: int = 16) -> tuple[Any, ...]:
    return (torch.randn(rows, 16, generator=torch.Generator().manual_seed(at)),)


def with_number(at: int) -> tuple[Any, ...]:
    return (*batch(at), 0.5 + at / 16)


KINDS: dict[type[nn.Module], Callable[[int], tuple[Any, ...]]] = {
    WarmUp: batch,
    Inner: with_number,
    NewKeys: with_number,
    Logging: batch,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_in_each_call_is_planned_in_parts_after_a_few_captures(
    kind: type[nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    eager, of_step = kind(), KINDS[kind]
    model = rematplan.apply(copy.deepcopy(eager), **{**SETTINGS, "budget": "4MiB"})
    plans = list[Any]()
    for at in range(2 * STEPS if kind in (Inner, NewKeys) else STEPS):
        for one in (eager, model):
            one(*of_step(at)).backward()
        LOG.append(0.0)
        grads = [[p.grad for p in one.parameters()] for one in (eager, model)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert all(map(torch.equal, eager.buffers(), model.buffers()))
        plans.append(rematplan.planning(model).plans)
    assert len(plans[-1]) == 2
    assert plans[-1] == plans[-2]
    assert sum("another graph" in str(one.message) for one in recwarn) == 1


class Packed(Base):
    """Runs an RNN on packed sequences, of which each call has other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(16, 16)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        packed = rnn.pack_padded_sequence(self.first(x), lengths, enforce_sorted=False)
        return self.second(rnn.pad_packed_sequence(self.rnn(packed)[0])[0]).square().mean()


@pytest.mark.parametrize("one_shape", [False, True])
def test_rnns_of_packed_sequences_run_outside_of_parts_unless_all_calls_are_alike(one_shape: bool) -> None:
    calls = [[4, 2, 1]] * 2 if one_shape else [[4, 2, 1], [1, 4, 4], [3, 3, 4]]
    options = {"dynamic_shapes": False} if one_shape else {}
    eager, x = Packed(), torch.randn(4, 3, 16)
    model = rematplan.apply(copy.deepcopy(eager), **{**SETTINGS, "budget": "4MiB"}, **options)
    with (
        nullcontext() if one_shape else pytest.warns(UserWarning, match="packed sequences.* planned in parts")
    ):
        for lengths in calls:
            for one in (eager, model):
                one(x, lengths).backward()
            grads = [[p.grad for p in one.parameters()] for one in (eager, model)]
            assert all(map(torch.equal, *grads))
    assert len(rematplan.planning(model).plans) == (1 if one_shape else 2)


class OwnSizes(nn.Module):
    """A module that is captured for each length separately."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / math.sqrt(len(x))).tanh()


class Routed(nn.Module):
    """Decides by its activations, and one of its modules gets another length in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = block(), OwnSizes()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        kept = h[: 1 + int((h.sum(1) > h.sum(1)[0]).sum())]
        return self.own(kept).square().mean() + h.square().mean()


def test_a_part_that_gets_always_new_sizes_is_no_part_any_longer() -> None:
    eager = Routed()
    model = rematplan.apply(copy.deepcopy(eager), **{**SETTINGS, "budget": "4MiB"})
    counts = list[int]()
    for at in range(2 * MANY_SIZES):
        for one in (eager, model):
            one(*batch(at, 4 * MANY_SIZES)).backward()
        counts.append(rematplan.planning(model).stats().captures)
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert counts[-1] < max(counts)


def test_a_model_of_more_sizes_than_plans_are_kept_is_planned_in_parts(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Scaled(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) / math.sqrt(len(x))).square().mean()

    monkeypatch.setattr(shape_options, "MAX_PLANS", MANY)
    eager = Scaled()
    model = rematplan.apply(copy.deepcopy(eager), **{**SETTINGS, "budget": "4MiB"})
    for at in range(STEPS):
        for one in (eager, model):
            one(*batch(at, 16 + at)).backward()
    grads = [[p.grad for p in one.parameters()] for one in (eager, model)]
    assert all(map(torch.equal, *grads))
    assert len(rematplan.planning(model).plans) == 2
    assert sum(f"for each of {MANY} sizes" in str(one.message) for one in recwarn) == 1


def test_a_few_outcomes_keep_the_whole() -> None:
    class Cyclic(WarmUp):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            self.step %= MANY
            return found

    model = rematplan.apply(Cyclic(), **SETTINGS)
    for at in range(2 * MANY):
        model(*batch(at)).backward()
    assert rematplan.planning(model).stats().captures == MANY


class Single(nn.Module):
    """Has single layers, and a number in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, by: float) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x)) * by).square().mean()


@pytest.mark.parametrize(
    ("kind", "of_step", "why"),
    [(Queue, batch, "parts need"), (Single, with_number, "no part")],
    ids=["parts that do not fit", "no parts"],
)
def test_a_model_that_stays_whole_is_captured_in_each_call_and_says_why(
    kind: type[nn.Module],
    of_step: Callable[[int], tuple[Any, ...]],
    why: str,
    recwarn: pytest.WarningsRecorder,
) -> None:
    eager = kind()
    model = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    for at in range(STEPS):
        for one in (eager, model):
            one(*of_step(at)).backward()
    assert len(rematplan.planning(model).plans) == STEPS
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), model.parameters(), strict=True)
    )
    (told,) = [str(one.message) for one in recwarn if "another graph" in str(one.message)]
    assert why in told


class Normalised(nn.Module):
    """An ActNorm, which sets its parameters from the first batch."""

    def __init__(self, flag: Any) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))
        if isinstance(flag, Tensor):
            self.register_buffer("is_set", flag.clone())
        else:
            self.is_set = flag

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.data = 1 / (x.detach().std(0) + 1e-6)
            if isinstance(self.is_set, Tensor):
                self.is_set.fill_(1)
            else:
                self.is_set = True
        return self.scale * (x + self.shift)


@pytest.mark.parametrize(
    ("flag", "how"),
    [
        (False, "in place"),
        (torch.tensor(False), "plan_module"),
        (torch.zeros(1, dtype=torch.uint8), "in place"),
    ],
)
def test_a_first_call_that_sets_parameters_runs_in_parts_and_later_ones_as_a_whole(
    flag: Any, how: str
) -> None:
    eager = nn.Sequential(Normalised(flag), block(), Normalised(flag), block())
    ours, options = copy.deepcopy(eager), {**SETTINGS, "budget": "100%"}
    planned = (
        rematplan.apply(ours, **options)
        if how == "in place"
        else rematplan.plan_module(ours, batch(0, 256), **options)
    )
    counts = []
    for at in range(4):
        for one in (eager, planned):
            one.zero_grad()
            one(*batch(at, 256)).square().mean().backward()
        grads = [[p.grad for p in one.parameters()] for one in (eager, planned)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert all(map(torch.equal, eager.state_dict().values(), planned.state_dict().values()))
        counts.append(rematplan.planning(planned).stats().plans)
    assert counts == [2, 1, 1, 1]
    (plan,) = rematplan.planning(planned).plans
    assert plan.peak <= plan.budget
