"""Laws of plans that are carried over to other sizes: one source serves all lengths bit by bit, the problem that no one
made is the one that the length gives by itself, the budget holds, and the numbers of what is kept stay bounded.
"""

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_bits import equal_after, planned_and_plain
from torch import Tensor, nn
from torch.nn import functional as F

import rematplan
from rematplan.module import shape_options
from rematplan.module.sized_plans import PATTERNS, STRUCTURES
from rematplan.planner.background import BackgroundSearch
from rematplan.planner.caches.plan_store import FAMILIES
from rematplan.planner.core.simulator import simulate
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.plans import sized_costs
from rematplan.plans.refining import Rechoosing, StepPlan
from rematplan.plans.resizing import CORNERS
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.graph.tracked_sizes import TrackedSize

WIDTH, HEADS = 8, 2
AUTO: dict[str, Any] = {"strategy": "auto", "budget": "92%", "loss_memory": "1x"}


class Block(nn.Module):
    """Attention and an MLP, with dropout; what they have in common with a language model."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            one.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2)
            for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        scores = F.dropout((q @ k.transpose(-1, -2)).tril().softmax(-1), self.dropout)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(x)


class Language(nn.Module):
    """Blocks over tokens. ``pair``: also returns the loss of the scores."""

    def __init__(self, dropout: float = 0.1, pair: bool = False, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.pair = nn.Embedding(20, WIDTH), pair
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, x: Tensor) -> Any:
        scores = self.head(self.blocks(self.tokens(x)))
        return (F.cross_entropy(scores.flatten(0, 1), x.flatten()), scores) if self.pair else scores


def tokens(b: int, t: int) -> tuple[Tensor, ...]:
    return (torch.randint(20, (b, t), generator=torch.Generator().manual_seed(t)),)


def images() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, WIDTH, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(WIDTH, 4, 3))


def pictures(b: int, t: int) -> tuple[Tensor, ...]:
    return (torch.randn(b, 3, t + 3, 2 * t + 2, generator=torch.Generator().manual_seed(t)),)


class Sliced(nn.Module):
    """Layers for the first twelve words. Where there are only twelve, eager mode takes no slice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Features of the first twelve words."""
        for layer in self.layers:
            x = layer(x).tanh()[:12, :].relu().sum(0) + x
        return x


def words(_b: int, t: int) -> tuple[Tensor, ...]:
    return (torch.randn(t, WIDTH, generator=torch.Generator().manual_seed(t)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "language": (Language, tokens),
    "language with its loss": (lambda: Language(0.0, pair=True), tokens),
    "images": (images, pictures),
    "sliced": (Sliced, words),
}
BEGUN = MODELS | {"two blocks": (lambda: Language(blocks=2), tokens)}
"""Of one block, no length between two others has a plan of its own."""


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundSearch, "submit", lambda *_: False)


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    out = model(*batch)
    loss = out[0] if isinstance(out, tuple) else out.square().sum()
    loss.backward()
    return [loss.detach()]


def clean(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    return step(model, batch)


def peak(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """The bytes of a step, with parameters, buffers and batch."""
    model.zero_grad()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *batch))
    return held + peak_above_entry(lambda: step(model, batch), torch.device("cpu"))[0]


def follow(planned: nn.Module, plain: nn.Module, batch: tuple[Tensor, ...], use: Any = clean) -> None:
    equal_after(lambda model: use(model, batch), planned, plain)


def last(planned: nn.Module) -> Any:
    return planned._rematplan.last


def other_members(planned: nn.Module) -> None:
    """Let the family of the present plan know block plans, too."""
    planner = planned._rematplan.planner
    problem = planner.problem(last(planned).compiled.step)
    for plan in ApproxDP().family(problem):
        planner.store.family(problem).add(problem, plan)


@cache
def _begun(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[nn.Module, nn.Module]:
    make, inputs = BEGUN[name]
    planned, plain = planned_and_plain(make(), *inputs(7, 61), **AUTO | dict(options))
    for sizes in ((7, 61), (5, 17), (6, 31)):
        follow(planned, plain, inputs(*sizes))
    other_members(planned)
    return planned, plain


def begun(name: str, **options: Any) -> tuple[nn.Module, nn.Module, Callable[[int, int], tuple[Tensor, ...]]]:
    """A model that was trained on three lengths, so that those between them need no step of their own."""
    planned, plain = copy.deepcopy(_begun(name, tuple(options.items())))
    return planned, plain, BEGUN[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_the_problem_that_is_not_made_is_that_of_the_length(name: str) -> None:
    planned, plain, inputs = begun(name)
    before = rematplan.planning(planned).stats().carried
    for sizes in ((6, 33), (5, 19), (7, 29), (6, 53)):
        follow(planned, plain, inputs(*sizes))
        entry = last(planned)
        alone = planned._rematplan.planner.problem(entry.compiled.step)
        assert entry.plan.fingerprint == alone.fingerprint
        assert entry.plan.peak == simulate(alone, entry.plan.schedule).peak
        assert entry.plan.peak <= entry.plan.budget
    stats = rematplan.planning(planned).stats()
    assert stats.captures == 1
    assert stats.carried - before >= 2


LEAST = {"language": 0, "language with its loss": 1, "images": 4, "sliced": 0}
"""The smallest lengths that give numbers: the mean of no losses is NaN, and an image needs some pixels."""
SIZES = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 64)), min_size=3, max_size=4)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(MODELS)), SIZES, st.sampled_from(("65%", "80%", "1GiB")), st.booleans())
def test_each_length_follows_eager_mode(
    name: str, shapes: list[tuple[int, int]], budget: str, training: bool
) -> None:
    planned, plain, inputs = begun(name, budget=budget, on_infeasible="least")
    planned.train(training)
    plain.train(training)
    for sizes in shapes:
        if sizes[1] >= LEAST[name]:
            follow(planned, plain, inputs(*sizes))


def test_a_source_serves_all_lengths_and_a_new_plan_adds_one() -> None:
    planned, plain, inputs = begun("two blocks", budget="80%")
    first, before = {last(planned).compiled.halves.source}, rematplan.planning(planned).stats().carried
    for length in (22, 33, 37, 41, 53, 59):
        follow(planned, plain, inputs(6, length))
        first.add(last(planned).compiled.halves.source)
    stats = rematplan.planning(planned).stats()
    assert stats.carried - before == 6
    assert 2 <= len(first) <= stats.sources < 6
    assert all("(s, " in source for source in first)


def test_a_length_that_equals_a_width_has_plans_of_its_own() -> None:
    planned, plain, inputs = begun("language")
    for sizes, carried in (
        ((6, 3 * WIDTH), False),
        ((6, 33), True),
        ((6, 4 * WIDTH), False),
        ((6, 37), True),
    ):
        follow(planned, plain, inputs(*sizes))
        assert last(planned).carried == carried, sizes


def test_a_length_that_equals_a_number_of_the_step_does_not_disturb_the_others() -> None:
    """It has another structure: no slices, which would cover the whole dimension."""
    planned, plain, inputs = begun("sliced")
    for sizes, carried in (((6, 33), True), ((6, 12), False), ((6, 37), True)):
        follow(planned, plain, inputs(*sizes))
        assert last(planned).carried == carried, sizes


def test_a_size_beyond_the_measured_ones_is_measured_once_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned, plain, inputs = begun("language", costs="profile")
    measured: list[int] = []

    def profile(step: Any, progress: Any, only: Any) -> Any:
        measured.append(len(only))
        return profile_costs(step, progress, only=only)

    monkeypatch.setattr(sized_costs, "profile_costs", profile)
    batch = inputs(7, 62)
    planned.prepare(*batch)
    assert len(measured) == 1
    assert measured[0] > len(last(planned).unplanned.captured.priced_calls) / 2
    follow(planned, plain, batch)
    assert peak(planned, batch) <= last(planned).plan.budget
    for _ in range(2):
        follow(planned, plain, inputs(6, 60))
        follow(planned, plain, batch)
    assert len(measured) == 1


def test_lengths_beyond_the_known_ones_are_planned_by_themselves() -> None:
    planned, plain, inputs = begun("language")
    for sizes, carried in (((6, 67), False), ((6, 59), True), ((5, 13), False), ((11, 43), False)):
        follow(planned, plain, inputs(*sizes))
        assert last(planned).carried == carried, sizes


def test_gradients_of_different_lengths_add_up() -> None:
    planned, plain, inputs = begun("language")
    for model in (planned, plain):
        model.zero_grad()
    for sizes in ((6, 33), (5, 19), (6, 33), (7, 29)):
        follow(planned, plain, inputs(*sizes), use=step)
    assert all(entry.plan.peak <= (entry.plan.budget or 0) for entry in planned._rematplan.plans.all())


def test_backwards_of_all_kinds_follow_at_a_carried_length() -> None:
    """A retained graph, gradients of another layout, and scores whose gradient the plan had left out."""

    def twice(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
        model.zero_grad()
        loss = model(*batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()]

    def turned(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(*batch).transpose(1, 2), *batch)
        loss.backward()
        return [loss.detach()]

    planned, plain, inputs = begun("language")
    for length in (33, 19):
        for use in (twice, turned, turned, clean):
            follow(planned, plain, inputs(6, length), use=use)
            assert last(planned).carried

    def scores(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
        model.zero_grad()
        loss, out = model(*batch)
        (loss + out.square().mean()).backward()
        return [loss.detach()]

    planned, plain, inputs = begun("language with its loss")
    follow(planned, plain, inputs(6, 33))
    assert last(planned).carried
    with pytest.warns(match="a gradient arrived for output 1"):
        follow(planned, plain, inputs(6, 33), use=scores)
    for length in (33, 19):
        follow(planned, plain, inputs(6, length), use=scores)


def test_peaks_at_carried_lengths_stay_within_the_budget() -> None:
    planned, plain, inputs = begun("language", costs="profile")
    for sizes in ((6, 33), (7, 37), (5, 19)):
        batch = inputs(*sizes)
        follow(planned, plain, batch)
        assert last(planned).carried
        assert peak(planned, batch) <= last(planned).plan.budget


class Causal(nn.Module):
    """Fused attention, whose workspace grows in steps with the length and not with the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            heads = layer(x)[:, None]
            x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        return x


def test_no_workspace_is_larger_than_planned() -> None:
    def inputs(b: int, t: int) -> tuple[Tensor, ...]:
        return (torch.randn(b, t, WIDTH),)

    options = {"strategy": "store_all", "budget": "1GiB", "costs": "profile"}
    planned, plain = planned_and_plain(Causal(), *inputs(6, 1024), **options)
    for sizes in ((6, 1024), (2, 64), (2, 16)):
        follow(planned, plain, inputs(*sizes))
    for sizes in ((6, 800), (3, 1000), (2, 300)):
        batch = inputs(*sizes)
        follow(planned, plain, batch)
        entry = last(planned)
        assert entry.carried
        alone = planned._rematplan.planner.problem(entry.compiled.step)
        assert entry.plan.peak >= simulate(alone, entry.plan.schedule).peak
        assert entry.plan.peak >= peak(planned, batch)


def test_thirty_lengths_leave_bounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_options, "MAX_PLANS", 6)
    planned, inputs = _begun.__wrapped__("language", ())[0], MODELS["language"][1]
    before, lengths = rematplan.planning(planned).stats().carried, random.Random(0)
    for _ in range(30):
        clean(planned, inputs(6, lengths.randint(17, 61)))
    runner = planned._rematplan
    stats, (shapes,) = rematplan.planning(planned).stats(), runner.captures.shapes.values()
    assert stats.plans <= 6
    assert stats.captures == 1
    assert stats.open_captures == 1
    assert stats.carried - before > 15
    (forward,) = shapes.forwards
    (plans,) = forward._plans.values()
    assert stats.sources <= 6 * len(plans._structures)
    assert len(plans._structures) <= STRUCTURES
    assert len(plans._of_pattern) <= PATTERNS
    assert all(len(one.resizing.corners) <= CORNERS for one in plans._structures)
    assert len(runner.plans.recent._used) <= 6
    assert len(runner.planner.store._families) <= FAMILIES


@pytest.mark.parametrize("saved", [0.0, 0.5])
def test_a_better_plan_of_one_length_serves_another(saved: float) -> None:
    """As soon as the family of plans changes, and has a cheaper one."""
    planned, _, inputs = begun("language")
    clean(planned, inputs(6, 33))
    plan, family, seen = last(planned).plan, SimpleNamespace(members=()), []
    better = replace(plan, estimate=replace(plan.estimate, cost=(1 - saved) * plan.estimate.cost))
    step_ = last(planned).compiled.like
    search = Rechoosing(plan, lambda: better, lambda one: StepPlan(step_, one), family, None, [])
    search.begin(lambda found: seen.append(found.plan))
    assert not search.ready
    family.members = (1,)
    assert search.ready == bool(saved)
    if saved:
        assert search.take()[0].plan is better
        assert seen == [better]
    assert not search.ready
    assert search.wait(0)
    assert not search.working


def test_a_tracked_size_is_an_integer() -> None:
    size = TrackedSize(7, 3)
    assert (size, repr(size), size.at, type(size + 1)) == (7, "7", 3, int)
    for other in (copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
        assert (other, other.at) == (7, 3)


def test_nothing_is_carried_where_a_plan_of_each_size_is_asked_for() -> None:
    make, inputs = MODELS["images"]
    planned, plain = planned_and_plain(make(), *inputs(7, 61))  # the least peak of each
    for sizes in ((7, 61), (5, 17), (6, 31), (6, 33)):
        follow(planned, plain, inputs(*sizes))
        assert not last(planned).carried
