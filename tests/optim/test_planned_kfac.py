"""K-FAC with the statistics of planned modules."""

import copy
import io

import pytest
import torch
from hook_source import HookSource
from small_networks import SHAPES, batch, maker
from torch import Tensor, nn

import rematplan
from rematplan.ir import UsageError
from rematplan.runtime.statistics.recorder import PackedFactors

SETTINGS = {"strategy": "approx_dp", "costs": "roofline"}
SAMPLES = 256


def deep() -> nn.Module:
    """Linear layers, and a norm that has no factors."""
    layers = (m for _ in range(6) for m in (nn.Linear(24, 24), nn.Tanh()))
    return nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), *layers, nn.Linear(24, 5))


SHAPES[deep] = (6,)
MAKE = maker(deep)


def planned(parts: int = 1, budget: str = "90%", **options: object) -> nn.Module:
    x, _ = batch(MAKE, 0, SAMPLES // parts)
    statistics = rematplan.Kronecker(**options)
    found = rematplan.plan_module(
        MAKE(),
        (x,),
        statistics=statistics,
        reserved=["gradients"] if parts > 1 else [],
        budget=budget,
        **SETTINGS,
    )
    assert any(plan.estimate.reruns > 0 for plan in rematplan.planning(found).plans)
    return found


def train(model: nn.Module, kfac: rematplan.KFAC, steps: range, parts: int = 1) -> None:
    for step in steps:
        kfac.zero_grad()
        x, y = batch(MAKE, step, SAMPLES)
        for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (nn.functional.cross_entropy(model(some), labels) / parts).backward()
        kfac.step()


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(((p - q).norm() / q.norm()).item() for p, q in pairs)


def kfac_of(model: nn.Module, **options: object) -> rematplan.KFAC:
    return rematplan.KFAC(model, 0.1, **{"others": torch.optim.AdamW, "inverse_every": 4, **options})


@pytest.mark.parametrize(("parts", "budget"), [(1, "90%"), (2, "105%")])
def test_a_recomputing_plan_trains_as_hooks_on_the_plain_model(parts: int, budget: str) -> None:
    model, plain = planned(parts, budget, fisher="empirical"), MAKE()
    ours = kfac_of(model, loss_scale=1 / parts)
    theirs = kfac_of(plain, source=HookSource(plain))
    assert ours.reserved_bytes() == theirs.reserved_bytes()
    train(model, ours, range(6), parts)
    train(plain, theirs, range(6))
    assert difference(model, plain) <= 1e-12


@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
def test_a_loss_scale_changes_nothing(fisher: str) -> None:
    """Only statistics of the backward of the loss contain it, and only they are divided by it."""
    x, _ = batch(MAKE, 0, SAMPLES)
    plain, scaled = (
        rematplan.plan_module(
            MAKE(), (x,), statistics=rematplan.Kronecker(fisher=fisher), budget="1GiB", **SETTINGS
        )
        for _ in range(2)
    )
    a, b = kfac_of(plain), kfac_of(scaled, loss_scale=1024.0)
    for step in range(3):
        x, y = batch(MAKE, step, SAMPLES)
        for model, kfac, scale in ((plain, a, 1), (scaled, b, 1024)):
            kfac.zero_grad()
            (nn.functional.cross_entropy(model(x), y) * scale).backward()
            for parameter in model.parameters():
                parameter.grad /= scale  # as a GradScaler does; a power of two changes no bits
            kfac.step()
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))


def test_micro_batches_of_unequal_sizes_are_one_batch() -> None:
    """Each loss is the sum over its samples ÷ those of the step, since a factor before the loss is squared in G."""
    model, plain = planned(2, "105%", fisher="empirical", loss_reduction="sum"), MAKE()
    ours, theirs = kfac_of(model, loss_scale=1 / SAMPLES), kfac_of(plain, source=HookSource(plain))
    for step in range(6):
        ours.zero_grad()
        x, y = batch(MAKE, step, SAMPLES)
        for some, labels in zip(x.split([128, 100, 28]), y.split([128, 100, 28]), strict=True):
            (nn.functional.cross_entropy(model(some), labels, reduction="sum") / SAMPLES).backward()
        ours.step()
    train(plain, theirs, range(6))
    assert difference(model, plain) <= 1e-12


def test_frozen_layers_stay_as_they_are_and_take_no_memory() -> None:
    def frozen() -> nn.Module:
        model = MAKE()
        model[2].requires_grad_(False)
        model[6].requires_grad_(False)
        return model

    model, plain = frozen(), frozen()
    asked = rematplan.Kronecker(fisher="empirical")
    x, _ = batch(MAKE, 0, SAMPLES)
    model = rematplan.plan_module(model, (x,), statistics=asked, budget="90%", **SETTINGS)
    ours, theirs = kfac_of(model), kfac_of(plain, source=HookSource(plain))
    assert ours.layers.keys() == theirs.layers.keys() == {f"{at}.weight" for at in (0, 4, 8, 10, 12, 14)}
    assert ours.reserved_bytes() == theirs.reserved_bytes() < kfac_of(planned()).reserved_bytes()
    train(model, ours, range(6))
    train(plain, theirs, range(6))
    assert difference(model, plain) <= 1e-12
    assert torch.equal(model[2].weight, MAKE()[2].weight)


def test_a_resumed_run_draws_the_same_labels_in_the_same_steps() -> None:
    whole, first, second = (planned(every=3) for _ in range(3))
    straight, before = kfac_of(whole), kfac_of(first)
    train(whole, straight, range(8))
    train(first, before, range(4))
    file = io.BytesIO()
    torch.save([first.state_dict(), before.state_dict()], file)
    file.seek(0)
    model_state, state = torch.load(file)
    second.load_state_dict(model_state)
    after = kfac_of(second)
    after.load_state_dict(state)
    train(second, after, range(4, 8))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))


def test_steps_without_statistics_use_the_inverses_before() -> None:
    model = planned(every=3)
    kfac = kfac_of(model, early_steps=100)
    made = []
    for step in range(7):
        train(model, kfac, range(step, step + 1))
        made.append(kfac.layers["0.weight"].a.made)
    assert made == [1, 1, 1, 2, 2, 2, 3]


def test_it_learns_from_labels_of_the_models_own() -> None:
    model = planned()
    kfac = kfac_of(model)

    def loss() -> Tensor:
        x, y = batch(MAKE, 0, SAMPLES)
        return nn.functional.cross_entropy(model(x), y)

    losses = []
    for _ in range(25):
        kfac.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        kfac.step()
    assert losses[-1].item() < 0.9 * losses[0].item()


def test_an_empty_batch_has_factors_of_no_rows() -> None:
    model = planned(fisher="empirical")
    kfac = kfac_of(model)
    train(model, kfac, range(2))
    kfac.zero_grad()
    nn.functional.cross_entropy(model(torch.ones(0, 6).double()), torch.ones(0).long()).backward()
    kfac.step()
    factors = rematplan.planning(model).statistics().factors["0.weight"]
    assert (factors.rows, factors.samples, float(factors.a.norm())) == (0, 0, 0.0)
    assert all(p.isfinite().all() for p in model.parameters())
    train(model, kfac, range(2, 3))
    assert all(p.isfinite().all() for p in model.parameters())


def test_names_of_factors_are_known_without_unpacking_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned()
    kfac = kfac_of(model)
    unpacked: list[str] = []
    real = PackedFactors.__getitem__
    monkeypatch.setattr(
        PackedFactors, "__getitem__", lambda self, name: unpacked.append(name) or real(self, name)
    )
    train(model, kfac, range(1))
    assert sorted(unpacked) == sorted(kfac.layers)


def test_a_copy_of_the_model_is_not_the_one_that_gives_statistics() -> None:
    model = planned()
    kfac = kfac_of(model)
    with pytest.raises(UsageError, match="no statistics yet"):
        train(copy.deepcopy(model), kfac, range(1))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_module_planned_again_with_the_optimizer_reserved_goes_on_to_the_bit(steps: int) -> None:
    straight, model = planned(every=2), planned(every=2)
    kfac, other = kfac_of(model), kfac_of(straight)
    train(model, kfac, range(steps))
    before = rematplan.planning(model).plan.budget
    again = rematplan.plan_module(
        model,
        (batch(MAKE, 0, SAMPLES)[0],),
        statistics=rematplan.Kronecker(every=2),
        budget=before + kfac.reserved_bytes(),
        reserved=[kfac],
        **SETTINGS,
    )
    kfac.follow(again)
    train(again, kfac, range(steps, 6))
    train(straight, other, range(6))
    assert all(map(torch.equal, again.parameters(), straight.parameters()))
    with pytest.raises(UsageError, match="its layers must be the same"):
        kfac.follow(
            rematplan.plan_module(
                nn.Linear(6, 5),
                (batch(MAKE, 0)[0].float(),),
                statistics=rematplan.Kronecker(),
                budget="200%",
                **SETTINGS,
            )
        )


def test_a_module_planned_without_statistics_is_refused() -> None:
    plain = rematplan.plan_module(MAKE(), (batch(MAKE, 0, SAMPLES)[0],), budget="90%", **SETTINGS)
    with pytest.raises(UsageError, match="planned without statistics"):
        kfac_of(plain)


def test_two_planned_modules_in_one_model_are_one_source() -> None:
    def halves() -> nn.Sequential:
        whole = MAKE()
        return nn.Sequential(whole[:6], whole[6:])

    plain, model = halves(), halves()
    x, _ = batch(MAKE, 0, SAMPLES)
    inputs = x, model[0](x).detach().requires_grad_()
    for at in range(2):
        asked = rematplan.Kronecker(fisher="empirical", terms=SAMPLES)
        settings = SETTINGS | {"budget": "200%", "strategy": "store_all"}
        model[at] = rematplan.plan_module(model[at], (inputs[at],), statistics=asked, **settings)
    ours, theirs = kfac_of(model), kfac_of(plain, source=HookSource(plain))
    assert set(ours.layers) == set(theirs.layers)
    train(model, ours, range(4))
    train(plain, theirs, range(4))
    assert difference(model, plain) <= 1e-12


class TwoHeads(nn.Module):
    """Its second head is computed and not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.used(x), self.unused(x)


def test_a_head_that_no_gradient_reaches_stays_as_it_is() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 6), torch.arange(16) % 5
    asked = rematplan.Kronecker(fisher="empirical")
    settings = SETTINGS | {"budget": "200%", "strategy": "store_all"}
    model = rematplan.plan_module(TwoHeads(), (x,), statistics=asked, **settings)
    kfac = kfac_of(model)
    unused, used = (head.weight.detach().clone() for head in (model.unused, model.used))
    for _ in range(3):
        kfac.zero_grad()
        nn.functional.cross_entropy(model(x)[0], y).backward()
        kfac.step()
    assert torch.equal(model.unused.weight, unused)
    assert not torch.equal(model.used.weight, used)
    assert "unused.weight" in rematplan.planning(model).statistics().skipped
