"""K-FAC as an optimizer: its update equals dense algebra, and it behaves as any optimizer must."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from hook_source import HookSource
from small_networks import batch, convolutional, maker, perceptron
from torch import Tensor, nn

from rematplan.ir import UsageError
from rematplan.optim.kfac import KFAC

Make = Callable[[], nn.Module]
PLAIN = {"momentum": 0.0, "kl_clip": None, "inverse": "cholesky"}


def optimizer(model: nn.Module, lr: float = 0.1, **options: object) -> KFAC:
    source = HookSource(model)
    return KFAC(model, lr, source=source, **{"others": torch.optim.AdamW, **options})


def backward(model: nn.Module, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    (loss * scale).backward()
    return loss.detach()


def train(model: nn.Module, kfac: KFAC, make: Make, steps: range) -> None:
    for step in steps:
        kfac.zero_grad()
        backward(model, *batch(make, step))
        kfac.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def dense_update(
    gradient: Tensor, a: Tensor, g: Tensor, rows: float, samples: float, damping: float
) -> Tensor:
    """The damped Kronecker product, inverted whole."""
    mean_a, mean_g = a / rows, g / samples
    pi = math.sqrt((mean_a.trace() / len(a)) / (mean_g.trace() / len(g)))
    left = mean_g + math.sqrt(damping) / pi * torch.eye(len(g), dtype=g.dtype)
    right = mean_a + math.sqrt(damping) * pi * torch.eye(len(a), dtype=a.dtype)
    return torch.linalg.solve(torch.kron(left, right), gradient.flatten()).view(gradient.shape)


def matrix(module: nn.Module) -> Tensor:
    grad = module.weight.grad.flatten(1)
    return grad if module.bias is None else torch.cat((grad, module.bias.grad[:, None]), 1)


def test_an_update_is_that_of_the_dense_damped_inverse(make: Make) -> None:
    model = make()
    kfac = optimizer(model, damping=0.02, **PLAIN)
    backward(model, *batch(make, 0))
    statistics = kfac._source.statistics()
    before = {name: matrix(module).clone() for name, module in kfac._source.kinds.items()}
    old = copy.deepcopy(model)
    kfac.step()
    for name, module in kfac._source.kinds.items():
        f = statistics.factors[f"{name}.weight"]
        if f.groups > 1:
            continue  # its blocks are compared below
        moved = matrix_of_difference(old.get_submodule(name), module) / 0.1
        expected = dense_update(before[name], f.a, f.g, f.rows, f.samples, 0.02)
        assert (moved - expected).norm() <= 1e-10 * expected.norm()


def matrix_of_difference(old: nn.Module, new: nn.Module) -> Tensor:
    parts = [(old.weight - new.weight).flatten(1)]
    parts += [] if old.bias is None else [(old.bias - new.bias)[:, None]]
    return torch.cat(parts, 1).detach()


def test_each_group_of_a_convolution_has_its_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten()).double()
    kfac = optimizer(model, damping=0.02, **PLAIN)
    model(torch.randn(5, 4, 4, 4, dtype=torch.float64)).square().sum(1).mean().backward()
    f = kfac._source.statistics().factors["0.weight"]
    grad, old = matrix(model[0]).view(2, 3, -1), copy.deepcopy(model)
    kfac.step()
    a, g = f.a / f.rows, f.g / f.samples
    size_a, size_g = a.diagonal(dim1=1, dim2=2).mean(), g.diagonal(dim1=1, dim2=2).mean()
    pi = math.sqrt(size_a / size_g)
    for block in range(2):
        left = g[block] + math.sqrt(0.02) / pi * torch.eye(3, dtype=g.dtype)
        right = a[block] + math.sqrt(0.02) * pi * torch.eye(a.shape[-1], dtype=a.dtype)
        expected = torch.linalg.solve(torch.kron(left, right), grad[block].flatten()).view(3, -1)
        moved = matrix_of_difference(old[0], model[0]).view(2, 3, -1)[block] / 0.1
        assert (moved - expected).norm() <= 1e-10 * expected.norm()


def test_averages_weigh_batches_by_their_rows_and_include_the_newest() -> None:
    make = maker(perceptron)
    model = make()
    kfac = optimizer(model, lr=0.0, damping=0.02, decay=0.8, weight_decay=0.0, **PLAIN)
    a, g, rows = 0.0, 0.0, 0.0
    for step, samples in enumerate((12, 5, 9)):
        kfac.zero_grad()
        backward(model, *batch(make, step, samples))
        f = kfac._source.statistics().factors["0.weight"]
        a, g, rows = 0.8 * a + f.a, 0.8 * g + f.g, 0.8 * rows + samples
        kfac.step()
    grad = matrix(model[0])
    expected = dense_update(grad, a, g, rows, rows, 0.02)
    got = kfac.layers["0.weight"].precondition(grad)
    assert (got - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("parts", [2, 3])
def test_micro_batches_are_one_batch(parts: int) -> None:
    make = maker(perceptron)
    once, split = make(), make()
    a = optimizer(once, inverse="cholesky")
    b = optimizer(split, inverse="cholesky", loss_scale=1 / parts)
    for step in range(4):
        x, y = batch(make, step)
        a.zero_grad()
        b.zero_grad()
        backward(once, x, y)
        for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            backward(split, some, labels, 1 / parts)
        a.step()
        b.step()
    torch.testing.assert_close(weights(split), weights(once), rtol=1e-10, atol=1e-12)


def test_a_scaled_loss_gives_the_same_bits() -> None:
    make = maker(perceptron)
    plain, scaled = make(), make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    a, b = optimizer(plain), optimizer(scaled, loss_scale=scaler.get_scale)
    for step in range(8):
        a.zero_grad()
        b.zero_grad()
        backward(plain, *batch(make, step))
        a.step()
        scaler.scale(
            nn.functional.cross_entropy(scaled(batch(make, step)[0]), batch(make, step)[1])
        ).backward()
        scaler.step(b)
        scaler.update()
    assert scaler.get_scale() > 2.0**10
    assert all(map(torch.equal, weights(plain), weights(scaled)))


def test_a_scaler_skips_a_step_that_overflows() -> None:
    make = maker(perceptron)
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    kfac = optimizer(model, loss_scale=scaler.get_scale)
    x, y = batch(make, 0)
    before = weights(model)
    scaler.scale(nn.functional.cross_entropy(model(x), y) * math.inf).backward()
    scaler.step(kfac)
    scaler.update()
    assert all(map(torch.equal, weights(model), before))
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("inverse", ["auto", "cholesky", "eigen", "low-rank", "diagonal"])
def test_a_resumed_run_has_the_same_bits(inverse: str, make: Make) -> None:
    def start() -> tuple[nn.Module, KFAC, torch.optim.lr_scheduler.LRScheduler]:
        model = make()
        kfac = optimizer(model, inverse=inverse, inverse_every=4, early_steps=2, weight_decay=0.01)
        return model, kfac, torch.optim.lr_scheduler.CosineAnnealingLR(kfac, 20)

    def run(
        model: nn.Module, kfac: KFAC, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: range
    ) -> None:
        for step in steps:
            train(model, kfac, make, range(step, step + 1))
            scheduler.step()

    whole, first, second = start(), start(), start()
    run(*whole, range(9))
    run(*first, range(5))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file), strict=True):
        part.load_state_dict(state)
    run(*second, range(5, 9))
    assert all(map(torch.equal, weights(whole[0]), weights(second[0])))


def test_schedulers_reach_both_optimizers() -> None:
    make = maker(convolutional)
    model = make()
    kfac = optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(kfac, lambda step: 0.5**step)
    train(model, kfac, make, range(1))
    scheduler.step()
    assert [group["lr"] for group in kfac.param_groups] == [0.05, 0.0005]
    assert [group["lr"] for group in kfac._others.param_groups] == [0.0005]


def test_param_groups_have_their_own_settings() -> None:
    make = maker(convolutional)
    still, model = make(), make()
    head = {id(p) for p in model[-1].parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in head], "lr": 0.0, "others": {"lr": 0.0}},
        {"params": model[-1].parameters(), "weight_decay": 0.5},
    ]
    kfac = KFAC(model, 0.1, source=HookSource(model), params=groups, others=torch.optim.SGD)
    backward(model, *batch(make, 0))
    kfac.step()
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), still.parameters(), strict=True)]
    assert same == [True] * (len(same) - 2) + [False] * 2


def test_parameters_outside_of_the_groups_stay() -> None:
    make = maker(perceptron)
    still, model = make(), make()
    kfac = KFAC(model, 0.1, source=HookSource(model), params=[{"params": model[0].parameters()}])
    backward(model, *batch(make, 0))
    kfac.step()
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), still.parameters(), strict=True)]
    assert same == [False, False, True, True, True]


def test_updates_are_clipped_to_a_divergence(make: Make) -> None:
    model = make()
    kfac = optimizer(model, momentum=0.0, kl_clip=1e-4)
    for step in range(3):
        kfac.zero_grad()
        backward(model, *batch(make, step))
        old = {name: layer.weight.detach().clone() for name, layer in kfac.layers.items()}
        kfac.step()
        moved = {name: old[name] - layer.weight.detach() for name, layer in kfac.layers.items()}
        raw = {name: layer.precondition(layer.gradient()) for name, layer in kfac.layers.items()}
        product = sum((raw[name] * layer.gradient()).sum() for name, layer in kfac.layers.items()) * 0.1**2
        assert product > 1e-4
        for name, layer in kfac.layers.items():
            (_, update), *_ = layer.updates(raw[name])
            torch.testing.assert_close(moved[name], 0.1 * update * (1e-4 / product) ** 0.5)


def test_momentum_and_decay_are_those_of_the_formula() -> None:
    make = maker(perceptron)
    model = make()
    kfac = optimizer(model, momentum=0.5, weight_decay=0.1, kl_clip=None)
    weight, held = model[0].weight.detach().clone(), 0.0
    for step in range(4):
        train(model, kfac, make, range(step, step + 1))
        update = kfac.layers["0.weight"].precondition(matrix(model[0]))[:, :-1]
        held = 0.5 * held + update
        weight = weight * (1 - 0.1 * 0.1) - 0.1 * held
        torch.testing.assert_close(model[0].weight.detach(), weight, rtol=1e-12, atol=1e-14)


def test_a_batch_with_nan_changes_nothing_and_is_said_once(make: Make) -> None:
    model = make()
    for module in model.modules():  # its running statistics would be NaN
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    kfac = optimizer(model)
    train(model, kfac, make, range(2))
    before = weights(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            kfac.zero_grad()
            x, y = batch(make, step)
            x[0] = math.nan
            backward(model, x, y)
            kfac.step()
    assert len([w for w in said if "skipped a step" in str(w.message)]) == 1
    assert all(map(torch.equal, weights(model), before))
    train(model, kfac, make, range(2, 4))
    assert all(w.isfinite().all() for w in weights(model))
    assert not all(map(torch.equal, weights(model), before))


def test_a_first_batch_with_nan_waits_for_the_next() -> None:
    make = maker(perceptron)
    model, other = make(), make()
    kfac, fresh = optimizer(model, factors_every=5), optimizer(other, factors_every=5)
    backward(model, torch.full((3, 6), math.nan, dtype=torch.float64), torch.zeros(3, dtype=torch.long))
    with pytest.warns(UserWarning, match="skipped"):
        kfac.step()
    train(model, kfac, make, range(3))
    train(other, fresh, make, range(3))
    assert all(map(torch.equal, weights(model), weights(other)))


@pytest.mark.parametrize("inverse", ["auto", "cholesky", "eigen", "low-rank", "diagonal"])
@pytest.mark.parametrize("kind", ["zero", "rank one", "huge", "tiny"])
def test_hard_factors_are_damped(kind: str, inverse: str) -> None:
    make = maker(perceptron)
    model = make().float()
    kfac = optimizer(model, inverse=inverse)
    for step in range(4):
        kfac.zero_grad()
        x, y = batch(make, step)
        x = x.float() * {"zero": 0.0, "rank one": 1.0, "huge": 1e12, "tiny": 1e-15}[kind]
        rows = 1 if kind == "rank one" else len(x)
        backward(model, x[:rows], y[:rows])
        kfac.step()
    assert all(w.isfinite().all() for w in weights(model))


def test_parameters_without_factors_go_to_the_other_optimizer() -> None:
    make = maker(convolutional)
    model, twin = make(), make()
    kfac = KFAC(model, 0.0, source=HookSource(model), others=lambda p: torch.optim.AdamW(p, lr=0.01))
    adamw = torch.optim.AdamW(twin[1].parameters(), lr=0.01)
    for step in range(3):
        train(model, kfac, make, range(step, step + 1))
        twin.zero_grad()
        backward(twin, *batch(make, step))
        adamw.step()
    assert all(map(torch.equal, weights(model), weights(twin)))


class Late(HookSource):
    """Promises factors of a layer, and never gives them."""

    def statistics(self):
        found = super().statistics()
        del found.factors["0.weight"]
        return found


def test_a_layer_whose_factors_never_come_is_handed_over_and_said() -> None:
    make = maker(perceptron)
    model = make()
    kfac = KFAC(model, 0.1, source=Late(model), others=torch.optim.AdamW)
    with pytest.warns(UserWarning, match="0.weight"):
        train(model, kfac, make, range(1))
    assert [len(g["params"]) for g in kfac.param_groups] == [3, 2]
    train(model, kfac, make, range(1, 4))
    twin = make()
    resumed = KFAC(twin, 0.1, source=Late(twin), others=torch.optim.AdamW)
    resumed.load_state_dict(copy.deepcopy(kfac.state_dict()))
    twin.load_state_dict(model.state_dict())
    train(model, kfac, make, range(4, 6))
    train(twin, resumed, make, range(4, 6))
    assert all(map(torch.equal, weights(model), weights(twin)))
    third = make()
    alone = KFAC(third, 0.1, source=HookSource(third))
    with pytest.raises(
        UsageError, match=r"the state has no factors of 0\.weight: state an optimizer for them"
    ):
        alone.load_state_dict(copy.deepcopy(kfac.state_dict()))


@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "low-rank", "diagonal"])
def test_reserved_bytes_are_those_of_the_state(inverse: str, make: Make) -> None:
    model = make()
    kfac = optimizer(model, inverse=inverse)
    before = kfac.reserved_bytes()
    train(model, kfac, make, range(2))
    assert kfac.reserved_bytes() == before == bytes_of(kfac)


def bytes_of(kfac: KFAC) -> int:
    def tensors(held: object) -> list[Tensor]:
        if isinstance(held, Tensor):
            return [held]
        parts = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
        return [t for part in parts for t in tensors(part)]

    return sum(t.nbytes for t in tensors(kfac.state_dict()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inverse": "lu"}, "unknown inverse 'lu'; known: auto, cholesky"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"damping": 0.0}, "damping is 0.0"),
        ({"decay": 1.0}, "decay is 1.0"),
        ({"inverse_every": 0}, "inverse_every is 0"),
        ({"factors_every": 0}, "factors_every is 0"),
        ({"early_steps": -1}, "early_steps is -1"),
        ({"kl_clip": 0.0}, "kl_clip is 0.0"),
        ({"others": None}, r"no factors for 1.weight, 1.bias: state an optimizer"),
        ({"params": [nn.Parameter(torch.ones(1))]}, "list of dictionaries"),
        ({"params": [{"params": [nn.Parameter(torch.ones(1))]}]}, "no weight has Kronecker factors"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimizer(maker(convolutional)(), **options)


def test_later_param_groups_are_refused() -> None:
    kfac = optimizer(maker(perceptron)())
    with pytest.raises(UsageError, match="cannot get further param groups"):
        kfac.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused(copied: Callable[[KFAC], object]) -> None:
    with pytest.raises(UsageError, match="KFAC cannot be copied or pickled: construct another one"):
        copied(optimizer(maker(perceptron)()))


def test_an_empty_batch_changes_no_average() -> None:
    make = maker(perceptron)
    model = make()
    kfac = optimizer(model)
    train(model, kfac, make, range(2))
    before = [(side.total.clone(), side.count) for layer in kfac.layers.values() for side in layer.sides]
    kfac.zero_grad()
    backward(model, torch.ones(0, 6, dtype=torch.float64), torch.ones(0, dtype=torch.long))
    kfac.step()
    sides = [side for layer in kfac.layers.values() for side in layer.sides]
    for side, (total, count) in zip(sides, before, strict=True):
        assert torch.equal(side.total, total)
        assert side.count == count


def test_a_step_before_any_statistics_is_refused() -> None:
    with pytest.raises(UsageError, match="no statistics yet"):
        optimizer(maker(perceptron)()).step()


def test_a_plain_module_gives_no_statistics() -> None:
    with pytest.raises(UsageError, match="has no Kronecker statistics"):
        KFAC(maker(perceptron)(), 0.1)
