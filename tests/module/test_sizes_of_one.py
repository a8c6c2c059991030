"""Where sizes of 1 make several strides true, gradients have eager mode's bits; and what a kernel's strides are, not
what a fake tensor says, decides what follows from strides."""

import copy
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematplan
from rematplan.ir import ModelError
from rematplan.module.captures import capture_call
from rematplan.runtime.capture.patches import fake_layouts
from rematplan.runtime.execute.backward_variants import AS_CAPTURED, BackwardVariant
from rematplan.runtime.execute.first_run import FirstRuns, OtherLayouts
from rematplan.runtime.execute.layout_check import LayoutCheck


class Do(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Pyramid(nn.Module):
    """A feature map plus its pooled features, as large again."""

    def __init__(self, mode: str, *pooled: nn.Module) -> None:
        super().__init__()
        self.pooled, self.mode = nn.Sequential(nn.AdaptiveAvgPool2d(1), *pooled), mode

    def forward(self, x: Tensor) -> Tensor:
        return x + F.interpolate(self.pooled(x), size=x.shape[2:], mode=self.mode)


class Gate(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x.mean((2, 3), keepdim=True))


C = 8
ONES = torch.ones(C, C)


def conv(size: int = 1, **options: int) -> nn.Module:
    return nn.Conv2d(C, C, size, padding=size // 2, bias=False, **options)


def last() -> nn.Module:
    return Do(lambda x: x.to(memory_format=torch.channels_last))


def tokens(x: Tensor) -> Tensor:
    return (x.flatten(2).transpose(1, 2) @ ONES).transpose(1, 2).reshape(x.shape)


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "pooled": lambda: [
        last(),
        conv(),
        nn.BatchNorm2d(C),
        Pyramid("bilinear", conv(), nn.BatchNorm2d(C)),
        conv(3),
    ],
    "gated": lambda: [last(), conv(3), Gate(conv(), nn.ReLU(), conv(), nn.Sigmoid()), conv(3)],
    "slopes": lambda: [last(), conv(3), Pyramid("bicubic", nn.PReLU(C), conv()), nn.PReLU(C), conv(3)],
    "groups": lambda: [conv(3, groups=4), last(), Pyramid("nearest", nn.GroupNorm(4, C), nn.GELU()), conv(3)],
    "instances": lambda: [last(), nn.InstanceNorm2d(C, affine=True), conv(3), Gate(conv(), nn.Softplus())],
    "transposed": lambda: [last(), nn.ConvTranspose2d(C, C, 3, 2), Gate(nn.Hardswish(), conv()), conv(3)],
    "shuffled": lambda: [
        last(),
        conv(3),
        Do(lambda x: F.channel_shuffle(x, 2)),
        Gate(nn.GLU(1), nn.Conv2d(4, C, 1)),
    ],
    "dropped": lambda: [
        last(),
        conv(3),
        nn.Dropout2d(0.3),
        Gate(nn.Dropout(0.5), conv(), nn.Softmax(1)),
        conv(3),
    ],
    "tokens": lambda: [last(), conv(3), Do(tokens), nn.InstanceNorm2d(C, affine=True), conv(3)],
    "clamped": lambda: [
        last(),
        conv(),
        Gate(nn.AdaptiveMaxPool2d(1), nn.Hardtanh(), nn.ReLU(inplace=True)),
        conv(3),
    ],
}
SHAPES = ((2, C, 5, 4), (1, C, 5, 4), (3, C, 1, 1), (2, C, 1, 4))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    y = model(x)
    (y if y.dim() == 0 else y.square().mean()).backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def follow(planned: nn.Module, plain: nn.Module, x: Tensor, times: int = 2) -> None:
    for _ in range(times):
        assert all(map(torch.equal, gradients(planned, x), gradients(plain, x)))


def planned_and_plain(parts: list[nn.Module], x: Tensor, budget: str) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(conv(3), *parts, Do(lambda y: y.square().mean()))
    plain = copy.deepcopy(model)
    options = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    return rematplan.plan_module(model, (x,), budget=budget, **options), plain


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    before = set(fake_layouts.DISTRUSTED)
    yield
    fake_layouts.DISTRUSTED.clear()
    fake_layouts.DISTRUSTED.update(before)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_have_eager_mode_s_bits(name: str) -> None:
    for k, shape in enumerate(SHAPES):
        torch.manual_seed(k)
        x = torch.randn(shape)
        try:
            gradients(nn.Sequential(*NETWORKS[name]()), x)
        except ValueError:  # batch norm refuses one value a channel
            continue
        planned, plain = planned_and_plain(NETWORKS[name](), x, "100%" if k % 2 else "min")
        follow(planned, plain, x)
    assert not fake_layouts.DISTRUSTED


def test_a_gradient_is_expanded_as_another_tensor() -> None:
    x = torch.randint(0, 9, (4, 3))
    plain = nn.Sequential(nn.EmbeddingBag(9, 5, mode="sum"), nn.Linear(5, 1))
    planned = rematplan.plan_module(copy.deepcopy(plain), (x,), budget="100%", costs="roofline", refine=False)
    follow(planned, plain, x)


def test_an_empty_batch_has_eager_mode_s_gradients() -> None:
    x = torch.randn(0, C, 4, 5)
    parts = [last(), nn.Upsample(scale_factor=2), conv(3), nn.Tanh()]
    planned, plain = planned_and_plain(parts, x, "100%")
    for model in (planned, plain):
        model(x).backward()
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad.nan_to_num(), q.grad.nan_to_num()) for p, q in pairs)


def test_doubtful_ops_of_equal_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original, x = fake_layouts._run, torch.randn(2, C, 5, 4)

    def runs(layers: int) -> int:
        ran: list[object] = []
        monkeypatch.setattr(fake_layouts, "_run", lambda *given: (ran.append(given[0]), original(*given))[1])
        net = nn.Sequential(last(), *(layer for _ in range(layers) for layer in (conv(3), nn.BatchNorm2d(C))))
        capture_call(net, (x,), {})
        return len(ran)

    assert runs(2) == runs(6) > 0


def test_the_first_run_finds_strides_that_fakes_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_layouts, "is_unsure", lambda op, *_, **__: op in fake_layouts.DISTRUSTED)
    torch.manual_seed(0)
    x = torch.randn(2, C, 5, 4)
    planned, plain = planned_and_plain(NETWORKS["pooled"](), x, "100%")
    follow(planned, plain, x, times=3)
    assert fake_layouts.DISTRUSTED
    compiled = planned._rematplan.last.compiled
    assert compiled.first_runs.all_passed


def test_only_first_runs_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    original = LayoutCheck.__call__

    def counted(run: LayoutCheck, value: str, tensor: Tensor | None) -> None:
        compared.append(value)
        original(run, value, tensor)

    monkeypatch.setattr(LayoutCheck, "__call__", counted)
    x = torch.randn(2, C, 5, 4)
    planned, plain = planned_and_plain(NETWORKS["gated"](), x, "100%")
    follow(planned, plain, x, times=1)
    first = len(compared)
    assert first > 20
    follow(planned, plain, x)
    assert len(compared) == first


def test_a_sound_backward_does_not_hide_an_earlier_failure() -> None:
    runs, found = FirstRuns(pytest.fail, (), ()), OtherLayouts(frozenset(), "other strides")
    runs.end_backward(AS_CAPTURED, SimpleNamespace(error=found))
    runs.end_backward(BackwardVariant(kept=True), SimpleNamespace(error=None))
    assert runs.failed is found


@torch.library.custom_op("rematplan_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


turned.register_fake(lambda x: x.new_empty(x.shape))
turned.register_autograd(lambda ctx, g: g * 3)


@torch.library.custom_op("rematplan_tests::fickle", mutates_args=())
def fickle(x: Tensor) -> Tensor:
    return x.t().contiguous().t() if x.any() else x.clone()  # a capture runs it on zeros


fickle.register_fake(lambda x: x.new_empty(x.shape))
fickle.register_autograd(lambda ctx, g: g * 3)


def test_an_op_whose_fake_is_wrong_is_captured_again() -> None:
    model = nn.Sequential(nn.Linear(6, 5), Do(lambda x: turned(x)), nn.Tanh(), nn.Linear(5, 3))
    x, plain = torch.randn(4, 6), copy.deepcopy(model)
    planned = rematplan.plan_module(model, (x,), budget="100%", costs="roofline", refine=False)
    follow(planned, plain, x)
    assert {torch.ops.rematplan_tests.turned.default} == fake_layouts.DISTRUSTED


def test_an_op_whose_strides_depend_on_values_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), Do(lambda x: fickle(x)), nn.Tanh(), nn.Linear(5, 3))
    planned = rematplan.plan_module(
        model, (torch.randn(4, 6),), budget="100%", costs="roofline", refine=False
    )
    with pytest.raises(ModelError, match=r"fickle.default returned a tensor of shape \(4, 5\) with strides"):
        planned(torch.randn(4, 6))


def test_fakes_of_clones_have_the_strides_of_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_layouts, "_run", None)
    chosen = random.Random(0)
    for _ in range(200):
        shape = tuple(chosen.choice((1, 1, 2, 3)) for _ in range(4))
        strides = tuple(chosen.choice((1, 2, 6, 18, 7)) for _ in shape)
        form = chosen.choice((torch.preserve_format, torch.contiguous_format, torch.channels_last))
        real = torch.empty_strided(shape, strides).clone(memory_format=form)
        with fake_layouts.TrueLayouts():
            fake = torch.empty_strided(shape, strides).clone(memory_format=form)
        assert fake.stride() == real.stride(), (shape, strides, form)
