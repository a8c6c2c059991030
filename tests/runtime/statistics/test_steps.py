"""Which training steps have statistics, what they sum over micro-batches, and what memory they take."""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from statistics_models import GPT
from statistics_reference import error
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, UsageError
from rematplan.module.plan_access import Planning
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.statistics.gram import CHUNK_BYTES

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"strategy": "approx_dp", "costs": "profile"}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(32, 5))


def batch(rows: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def planned(
    model: nn.Module, x: Tensor, budget: str | int = "1GiB", accumulate: bool = False, **options: Any
) -> tuple[nn.Module, Planning]:
    options = {"fisher": "empirical"} | options
    made = rematplan.plan_module(
        model,
        (x,),
        budget=budget,
        **SETTINGS,
        reserved=["gradients"] if accumulate else [],
        statistics=rematplan.Kronecker(**options),
    )
    return made, rematplan.planning(made)


def step(model: nn.Module, x: Tensor) -> None:
    functional.cross_entropy(model(x), x[:, 0].abs().long()).backward()


def summed(model: nn.Module, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """a and g of the first layer of a network, by hand."""
    a, g = torch.zeros(33, 33), torch.zeros(32, 32)
    for x in batches:
        rows: list[Tensor] = []
        handle = model[0].register_forward_hook(
            lambda m, i, o, rows=rows: o.register_hook(rows.append) and None
        )
        step(model, x)
        handle.remove()
        with_one = functional.pad(x, (0, 1), value=1.0)
        a += with_one.T @ with_one
        scaled = rows[0] * len(x)
        g += scaled.T @ scaled
    model.zero_grad()
    return a, g


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_micro_batches_of_a_step_add_up(micro: int, accumulate: bool) -> None:
    model = network()
    batches = [batch(512 - 100 * k, k) for k in range(micro)]
    a, g = summed(copy.deepcopy(model), batches)
    own, planning = planned(model, batches[0], accumulate=accumulate)
    optimizer = torch.optim.SGD(own.parameters(), 0.0)
    for at in range(2):
        for x in batches:
            step(own, x)
        found = planning.statistics()
        factors = found.factors["0.weight"]
        assert (found.step, factors.rows, factors.samples) == (at, *[sum(map(len, batches))] * 2)
        assert error(factors.a, a) < 1e-6
        assert error(factors.g, g) < 1e-5
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(at))


def test_every_nth_step_has_statistics_and_its_micro_batches_all() -> None:
    own, planning = planned(network(), batch(), every=3)
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    seen = []
    for _ in range(7):
        for k in range(2):
            step(own, batch(seed=k))
        found = planning.statistics()
        seen.append(found.factors["0.weight"].rows if found.factors else 0)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [1024, 0, 0, 1024, 0, 0, 1024]
    assert planning.statistics().step == 6


def test_who_asks_decides_which_steps_have_statistics() -> None:
    own, planning = planned(network(), batch(), every=100)
    for asked, has in ((True, True), (False, False), (False, False), (None, False), (True, True)):
        planning.take_statistics(asked)
        step(own, batch())
        assert bool(planning.statistics().factors) is has


def test_without_an_optimizer_a_forward_without_gradients_begins_a_step() -> None:
    own, planning = planned(network(), batch(), every=2)
    seen = []
    for _ in range(4):
        step(own, batch())
        seen.append(len(planning.statistics().factors))
        for parameter in own.parameters():
            parameter.grad = None
    assert seen == [4, 0, 4, 0]


def test_evaluation_and_forwards_without_backward_count_for_nothing() -> None:
    own, planning = planned(network(), batch(), every=2)
    with torch.no_grad():
        own(batch())
    own(batch())
    own(batch())
    step(own, batch())
    assert planning.statistics().factors["0.weight"].rows == 512
    assert planning.statistics().step == 0


def test_two_modules_have_separate_statistics() -> None:
    first, one = planned(network(), batch(), every=1)
    second, other = planned(network(), batch(), every=1)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (first, second)]
    for _ in range(2):
        step(first, batch())
        optimizers[0].step()
        first.zero_grad()
    step(second, batch())
    step(first, batch())
    assert (one.statistics().step, other.statistics().step) == (2, 0)
    assert not torch.equal(one.statistics().factors["0.weight"].g, other.statistics().factors["0.weight"].g)


def test_statistics_go_when_the_next_step_begins() -> None:
    own, planning = planned(network(), batch(), every=2)
    step(own, batch())
    own.zero_grad()
    own(batch())
    assert not planning.statistics().factors


def test_a_module_without_statistics_says_so() -> None:
    own = rematplan.plan_module(network(), (batch(),), budget="1GiB", **SETTINGS)
    with pytest.raises(UsageError, match="planned without statistics"):
        rematplan.planning(own).statistics()


NETWORKS = {
    "mlp": lambda: (network(), batch()),
    "cnn": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(784, 5),
        ),
        torch.randn(16, 3, 16, 16),
    ),
    "gpt": lambda: (GPT(d=32, blocks=1), torch.randint(0, 11, (16, 6))),
    "short mlp": lambda: (network(), batch(192)),
}


@cache
def least(name: str, **options: Any) -> int:
    """The smallest peak of the strategy's plans of a network's step, or of its step with statistics."""
    statistics = rematplan.Kronecker(**options) if options else None
    model, x = NETWORKS[name]()
    made = rematplan.plan_module(
        model, (x,), budget="min", strategy="approx_dp", costs="profile", statistics=statistics
    )
    return max(p.peak for p in rematplan.planning(made).plans)


def loss_of(y: Tensor) -> Tensor:
    return functional.cross_entropy(y.flatten(0, -2), torch.zeros(y.shape[:-1], dtype=torch.long).flatten())


@pytest.mark.parametrize(
    ("name", "approx", "fisher"),
    [
        ("cnn", "expand", "mc"),
        ("cnn", "reduce", "empirical"),
        ("mlp", "expand", "empirical"),
        ("gpt", "reduce", "mc"),
    ],
)
def test_the_measured_peak_is_within_the_budget(name: str, approx: str, fisher: str) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    options = {"approx": approx, "fisher": fisher}
    budget = least(name, **options)
    for amount in (budget, int(1.3 * budget)):
        own, planning = planned(copy.deepcopy(model), x, budget=amount, every=2, **options)
        resident = sum(p.nbytes for p in own.parameters()) + x.nbytes
        for counted in (True, False, True):
            above, _ = peak_above_entry(lambda own=own: loss_of(own(x)).backward(), CPU)
            assert bool(planning.statistics().factors) is counted
            assert resident + above <= amount
            assert planning.plan.peak <= amount
            own.zero_grad()


@pytest.mark.parametrize(("name", "approx"), [("mlp", "expand"), ("cnn", "reduce"), ("gpt", "expand")])
def test_the_least_peak_grows_by_no_more_than_the_factors_and_a_chunk(name: str, approx: str) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    own, planning = planned(copy.deepcopy(model), x, approx=approx)
    loss_of(own(x)).backward()
    factors = planning.statistics().factors
    packed = {id(t): t.nbytes for name in factors for pair in factors.packed(name) for t in pair}
    with_statistics = least(name, approx=approx, fisher="empirical")
    assert with_statistics <= least(name) + sum(packed.values()) + CHUNK_BYTES


@pytest.mark.parametrize("room", [1.02, 1.2])
def test_earlier_micro_batches_are_within_the_budget(room: float) -> None:
    model, x = NETWORKS["short mlp"]()
    gradients = sum(p.nbytes for p in model.parameters())
    sums = 4 * 2 * 32 * 33 * 4
    budget = int(room * (least("short mlp", fisher="empirical") + gradients + sums))
    own, planning = planned(model, x, budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro in range(3):
            there = sum(p.grad.nbytes for p in own.parameters() if p.grad is not None)
            factors = planning.statistics().factors
            tensors = [t for name in factors for pair in factors.packed(name) for t in pair]
            resident = there + sum({id(t): t.nbytes for t in tensors}.values())
            resident += sum(p.nbytes for p in own.parameters()) + x.nbytes
            assert bool(tensors) is bool(micro)
            above, _ = peak_above_entry(lambda: step(own, x), CPU)
            assert resident + above <= budget


def test_triangles_are_packed() -> None:
    model = nn.Linear(1023, 512)
    own, planning = planned(model, torch.randn(8, 1023))
    own(torch.randn(8, 1023)).sum().backward()
    ((a, g),) = planning.statistics().factors.packed("weight")
    assert a.numel() <= 0.54 * 1024**2
    assert g.numel() <= 0.57 * 512**2


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_a_share_of_the_rows_estimates_the_sums(approx: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 5)
    )
    x = torch.randn(256, 3, 8, 8)
    found = []
    for share in (1.0, 0.25):
        own, planning = planned(copy.deepcopy(model), x, share=share, approx=approx)
        functional.cross_entropy(own(x), torch.zeros(256, dtype=torch.long)).backward()
        found.append(planning.statistics().factors)
    for name, whole in found[0].items():
        part = found[1][name]
        assert part.rows < 0.26 * whole.rows
        few = part.rows < 4 * len(part.a)
        assert few or error(part.a / part.rows, whole.a / whole.rows) < 0.2
        assert 0.9 < float(part.a.trace() / part.rows / (whole.a.trace() / whole.rows)) < 1.1
        assert 0.6 < float(part.g.trace() / whole.g.trace()) < 1.6


def test_sums_are_float32_under_bfloat16() -> None:
    model, x = network(), batch()
    wide = copy.deepcopy(model)
    found = []
    for net, cast in ((model, True), (wide, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            own, planning = planned(net, x)
            y = own(x)
        functional.cross_entropy(y.float(), x[:, 0].abs().long()).backward()
        found.append(planning.statistics().factors)
    for name, own_factors in found[0].items():
        assert own_factors.a.dtype == own_factors.g.dtype == torch.float32
        assert error(own_factors.a, found[1][name].a) < 0.01
        assert error(own_factors.g, found[1][name].g) < 0.05
    rounded = functional.pad(x.bfloat16().float(), (0, 1), value=1.0)
    assert error(found[0]["0.weight"].a, rounded.T @ rounded) < 1e-6


def test_a_saved_plan_has_no_statistics(tmp_path: Any) -> None:
    own = rematplan.plan_module(network(), (batch(),), budget="1GiB", **SETTINGS)
    rematplan.save_plan(own.plan, tmp_path / "plan.json")
    with pytest.raises(UsageError, match="a saved plan cannot be used together with statistics"):
        rematplan.plan_module(
            network(),
            (batch(),),
            statistics=rematplan.Kronecker(),
            strategy=rematplan.SavedPlan(tmp_path / "plan.json"),
        )


def test_copies_and_pickles_have_separate_statistics() -> None:
    own, planning = planned(network(), batch(), every=1)
    twin = copy.deepcopy(own)
    step(twin, batch())
    assert not planning.statistics().factors
    assert rematplan.planning(twin).statistics().factors["0.weight"].rows == 512


def test_plans_that_invert_or_overlap_give_the_same_statistics() -> None:
    model, x = network(), batch()
    found = []
    for options in ({}, {"inverses": True}, {"strategy": rematplan.Auto(time_limit=0.1, two_lanes="on")}):
        own = rematplan.plan_module(
            copy.deepcopy(model),
            (x,),
            budget="70%",
            costs="roofline",
            statistics=rematplan.Kronecker(fisher="empirical"),
            **{"strategy": rematplan.Auto(time_limit=0.1), **options},
        )
        step(own, x)
        found.append(rematplan.planning(own).statistics().factors)
    for other in found[1:]:
        for name, factors in found[0].items():
            assert error(other[name].a, factors.a) < 1e-5
            assert error(other[name].g, factors.g) < 1e-5


def test_an_infeasible_budget_is_refused_when_the_module_is_planned() -> None:
    plain = least("mlp")
    with pytest.raises(InfeasibleBudget):
        planned(network(), batch(), budget=plain)
