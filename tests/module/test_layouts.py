"""Laws of layouts: however tensors lie in memory, a planned step's gradients have eager mode's bits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan


class Permute(nn.Module):
    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Roll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll((1, 2), (2, 3))


class Written(nn.Module):
    """Writes into what its strides say."""

    def __init__(self) -> None:
        super().__init__()
        self.corner = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided_scatter(x.contiguous(), self.corner, (2, 2), (3, 1), 1)


class _Masking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        own = gradient.clone()
        own[x < 0] = 0
        return own.mul_(2)


class Masking(nn.Module):
    """Writes into the gradient in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return _Masking.apply(x)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


C = 8


def stem() -> nn.Module:
    return nn.Conv2d(3, C, 4, 4)


def block(*end: nn.Module) -> nn.Module:
    """A block of ConvNeXt, which permutes to have its channels last, and scales them."""
    wide = (nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
    return Residual(nn.Conv2d(C, C, 7, padding=3, groups=C), Permute(0, 2, 3, 1), *wide, *end)


BACK = (0, 3, 1, 2)
MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "scaled, then permuted": lambda: nn.Sequential(stem(), *(block(Scale(C), Permute(*BACK)) for _ in "ab")),
    "permuted, then scaled": lambda: nn.Sequential(
        stem(), *(block(Permute(*BACK), Scale(C, 1, 1)) for _ in "ab")
    ),
    "linear, permuted": lambda: nn.Sequential(
        stem(), Permute(0, 2, 3, 1), nn.Linear(C, 5), nn.Tanh(), Permute(*BACK)
    ),
    "layer norm, permuted": lambda: nn.Sequential(
        stem(), Permute(0, 2, 3, 1), nn.LayerNorm(C), Permute(*BACK)
    ),
    "batch norm": lambda: nn.Sequential(
        stem(), nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 3), nn.BatchNorm2d(C)
    ),
    "group norm": lambda: nn.Sequential(
        stem(), nn.GroupNorm(2, C), nn.SiLU(), nn.Conv2d(C, C, 3), nn.GroupNorm(2, C)
    ),
    "written": lambda: nn.Sequential(stem(), Written(), nn.Conv2d(C, C, 3), Written()),
    "rolled": lambda: nn.Sequential(stem(), Roll(), nn.Linear(11, 5), nn.Tanh(), Roll()),
    "gradients written in place": lambda: nn.Sequential(stem(), Scale(C, 1, 1), Masking()),
    "norms of what is permuted": lambda: nn.Sequential(
        Permute(3, 1, 2, 0),
        nn.BatchNorm2d(3),
        nn.Linear(3, 6),
        nn.LayerNorm(6),
        Permute(1, 3, 0, 2),
        nn.Softmax(1),
    ),
    **{
        f"{name} batch norm of tokens": lambda norm=norm: nn.Sequential(
            *(stem(), nn.Flatten(2), Permute(0, 2, 1), nn.Linear(C, C), Permute(0, 2, 1), norm()),
            *(Permute(0, 2, 1), nn.Linear(C, 3)),
        )
        for name, norm in (
            ("frozen", lambda: nn.BatchNorm1d(C).eval()),
            ("untracked", lambda: nn.BatchNorm1d(C, track_running_stats=False)),
        )
    },
    "tokens": lambda: nn.Sequential(
        stem(), nn.Flatten(2), Permute(0, 2, 1), nn.Linear(C, C), Scale(143, 1), Permute(0, 2, 1)
    ),
    **{
        f"{kind.__name__} of tokens": lambda kind=kind: nn.Sequential(
            *(stem(), nn.Flatten(2), Permute(0, 2, 1), nn.Linear(C, C), kind(), Permute(0, 2, 1)),
            *(nn.Tanh(), nn.Linear(143, 3)),
        )
        for kind in (nn.Softplus, nn.Hardswish, nn.Hardtanh)
    },
}


def backward_of_dense(y: Tensor) -> None:
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))


def backward_of_transposed(y: Tensor) -> None:
    tangent = torch.randn(y.transpose(1, -1).shape, generator=torch.Generator().manual_seed(1))
    y.backward(tangent.transpose(1, -1))


LOSSES: dict[str, Callable[[Tensor], None]] = {
    "sum": lambda y: y.sum().backward(),
    "mean": lambda y: y.mean().backward(),
    "square": lambda y: (y * y).mean().backward(),
    "dense": backward_of_dense,
    "transposed": backward_of_transposed,
}


def planned_and_plain(name: str, x: Tensor, last: bool, budget: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = MODELS[name]()
    model = model.to(memory_format=torch.channels_last) if last else model
    plain = copy.deepcopy(model)
    options = {"strategy": "approx_dp" if budget == "min" else "store_all", "costs": "roofline"}
    return rematplan.plan_module(model, (x,), budget=budget, **options), plain


def gradients(model: nn.Module, x: Tensor, backward: Callable[[Tensor], None]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    backward(model(x))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_eager_mode_s_bits_for_any_strides(name: str, form: torch.memory_format) -> None:
    x = torch.randn(3, 3, 52, 44, generator=torch.Generator().manual_seed(0)).to(memory_format=form)
    last = form is torch.channels_last
    planned, plain = planned_and_plain(name, x, last, "min" if last else "100%")
    for loss, backward in LOSSES.items():
        for _ in range(2):  # what may be written over is known from the second time on
            found, expected = gradients(planned, x, backward), gradients(plain, x, backward)
            wrong = [n for n in expected if not torch.equal(found[n], expected[n])]
            assert not wrong, loss


class Regression(nn.Module):
    """Gives its loss, and what the loss is of, which lies otherwise than what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.linear(x.flatten(2)).transpose(2, 1) * y.square().mean(1, keepdim=True)
        return functional.mse_loss(found, y), found


def test_a_gradient_that_is_not_accumulated_may_have_other_strides() -> None:
    torch.manual_seed(0)
    plain, given = Regression(), (torch.randn(4, 3, 2, 3), torch.randn(4, 5, 3))
    planned = rematplan.plan_module(
        copy.deepcopy(plain), given, budget="min", strategy="approx_dp", costs="roofline"
    )
    for at in ([0], [1], [0, 1], [0]):
        for model in (planned, plain):
            model.zero_grad(set_to_none=True)
            outputs = model(*given)
            sum(outputs[k].sum() for k in at).backward()
        assert torch.equal(planned.linear.weight.grad, plain.linear.weight.grad)


class Experts(nn.Module):
    """Rows go through the weights of the group that they stand in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 16)), nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = functional.grouped_mm(x, self.up, offs=ends).tanh()
        return functional.grouped_mm(hidden, self.down, offs=ends)


def test_what_only_fakes_refuse_is_planned() -> None:
    model, x, ends = Experts(), torch.randn(12, 8), torch.tensor([2, 7, 12], dtype=torch.int32)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(model, (x, ends), budget="min", strategy="approx_dp", costs="roofline")
    for one in (planned, plain):
        one(x, ends).pow(2).sum().backward()
    assert torch.equal(planned.up.grad, plain.up.grad)
    assert torch.equal(planned.down.grad, plain.down.grad)


def test_a_backward_learns_what_it_may_write_over_in_each_layout() -> None:
    x = torch.randn(3, 3, 52, 44).to(memory_format=torch.channels_last)
    planned, _ = planned_and_plain("batch norm", x, True, "100%")
    compiled = planned._rematplan.last.compiled.variants.compiled
    assert len(compiled) == 1
    for _ in range(2):
        planned(x).mean().backward()  # contiguous, where the output has its channels last
    assert len(compiled) == 2
    (variant,) = (w for w in compiled if w.strides)
    assert variant.strides == (planned(x).contiguous().stride(),)
    assert "aten_threshold_backward_grad_input" in compiled[variant][0].function.__code__.co_names


class Divided(nn.Module):
    """Whole numbers that do not lie row by row are divided by others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        shares = torch.floor_divide(n.t(), (n + 1).t()) + torch.div(
            7 * n.t(), (n + 1).t(), rounding_mode="floor"
        )
        return self.linear(x) * shares.t()


def test_integers_are_divided_for_any_strides() -> None:
    model, x, n = Divided(), torch.randn(6, 8), torch.arange(48).view(6, 8)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(model, (x, n), budget="min", strategy="approx_dp", costs="roofline")
    assert torch.equal(planned(x, n), plain(x, n))


class Cells(nn.Module):
    """Recurrent cells, whose gates are parts of one tensor that are written in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(width, width), nn.GRUCell(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for cell in self.cells:
            state = cell(3 * x, state)
        return state


@pytest.mark.parametrize("width", [8, 20, 64])
def test_what_is_written_in_place_in_rows_has_eager_mode_s_bits(width: int) -> None:
    """The last numbers of each row of a gate go another way through a sigmoid than those before."""
    torch.manual_seed(0)
    plain, x = Cells(width), torch.randn(50, width)
    planned = rematplan.plan_module(
        copy.deepcopy(plain), (x,), budget="100%", strategy="store_all", costs="roofline"
    )
    results = []
    for model in (planned, plain):
        y = model(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))
    laid = planned.source.count("rematplan_laid(")
    assert (laid == 0) == (width == 64)


class Noisy(nn.Linear):
    """Draws random numbers into tensors that do not lie row by row."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(16, 16)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(super().forward(x))


def with_normal_columns(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise[:, 1:9].normal_()
    return x * noise


def with_random_slopes(x: Tensor) -> Tensor:
    slopes = x.detach().clone()
    functional.rrelu_(slopes[:, 1:9], training=True)  # draws, but reads what it writes over
    return x * slopes


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x.t(), 0.15),  # at this rate eager mode's own, not the fused one
    "probabilities": lambda x: x.t() * torch.empty_like(x.t()).bernoulli_(x.detach().t().sigmoid()),
    "columns": with_normal_columns,
    "slopes": with_random_slopes,
    "whole numbers": lambda x: x.t() * torch.empty_like(x.t()).random_(0, 7),
    "whole numbers from one on": lambda x: x * torch.empty_like(x).random_(1, 7),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_in_memory_order(name: str) -> None:
    torch.manual_seed(0)
    plain, x = Noisy(DRAWS[name]), torch.randn(12, 16)
    planned = rematplan.plan_module(
        copy.deepcopy(plain), (x,), budget="min", strategy="approx_dp", costs="roofline"
    )
    results = []
    for model in (planned, plain):
        torch.manual_seed(3)
        y = model(x)
        y.square().sum().backward()
        results.append([y.detach(), model.weight.grad, torch.get_rng_state()])
    assert all(map(torch.equal, *results))


class Windows(nn.Linear):
    """Writes into windows of 3 numbers, or into one of them."""

    def __init__(self, width: int, one: bool) -> None:
        super().__init__(width, width)
        self.one = one

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).detach()
        windows = y.unfold(1, 3, 3)
        (windows.unbind(1)[0] if self.one else windows).mul_(2)
        return super().forward(y)


@pytest.mark.parametrize("one", [False, True])
def test_writing_into_windows_is_right_or_has_no_plan(one: bool) -> None:
    """PyTorch's functional form of it puts 0 where no window is."""
    settings = {"budget": "100%", "strategy": "store_all", "costs": "roofline"}
    plain, x = Windows(12, one), torch.randn(4, 12)
    assert torch.equal(rematplan.plan_module(copy.deepcopy(plain), (x,), **settings)(x), plain(x))
    with pytest.warns(UserWarning, match="windows"):
        rematplan.plan_module(Windows(13, one), (torch.randn(4, 13),), **settings)


class Glances(nn.Linear):
    """Reads overlapping windows one by one, as local attention does."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = super().forward(x).unfold(1, 3, 1).unbind(1)
        return first.exp() + sum(others)


def test_windows_are_read_one_by_one() -> None:
    plain, x = Glances(12, 12), torch.randn(4, 12)
    planned = rematplan.plan_module(
        copy.deepcopy(plain), (x,), budget="100%", costs="roofline", strategy=rematplan.Auto(time_limit=0.1)
    )
    for model in (planned, plain):
        model(x).square().sum().backward()
    assert torch.equal(planned.weight.grad, plain.weight.grad)
