"""Laws of calls that write over a dying operand: the same bits, less held, and never a tensor that is still wanted."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.execute.in_place import ATEN, BUFFERED, _sibling

X = torch.linspace(-3, 3, 48 * 64).reshape(48, 64)


class Plain(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x @ self.weight, self.weight)


def _narrow_images(y: Tensor, w: Tensor) -> Tensor:
    """Images of one pixel: contiguous and channels last at once, and group norm adds up by which of them it is told."""
    images = y.view(6, 8, 64, 1).transpose(1, 2)[:, :, :1]
    kernel = w.view(64, 64, 1, 1).to(memory_format=torch.channels_last)
    for _ in range(3):
        images = functional.group_norm(images + functional.conv2d(images * 1, kernel), 4)
    return images


def _complex(y: Tensor) -> Tensor:
    """So few numbers that kernels take them one by one."""
    return torch.view_as_complex(y[:3, :10].reshape(3, 5, 2))


def overwritten(body: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """The ops that write over an operand in a step that keeps everything, after checking it against plain autograd."""
    model = Plain(body)
    plain = copy.deepcopy(model)
    x = X.clone().requires_grad_()
    planned = rematplan.plan_module(model, (x,), budget="100%", strategy="store_all", costs="roofline")
    found = []
    for one in (plain, planned):
        torch.manual_seed(0)
        x.grad = None
        loss = one(x)
        loss.pow(2).mean().backward()
        found.append((loss.detach().clone(), x.grad, one.weight.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    calls = re.findall(r"= (\w+)\(", planned.source)
    return [name for name in calls if name.endswith("grad_input") or "__" in name]


SIBLINGS = [
    "relu gelu sigmoid tanh exp silu neg sin abs sqrt leaky_relu elu hardtanh",
    "threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward leaky_relu_backward",
    "hardtanh_backward",
]
CONSTANTS = {
    "threshold_backward": (0.0,),
    "leaky_relu_backward": (0.1, False),
    "hardtanh_backward": (-1.0, 1.0),
}
"""What they take beside a tensor, or beside two if they are formulas of gradients."""


@pytest.mark.parametrize("name", " ".join(SIBLINGS).split())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_writing_over_an_operand_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    op = getattr(ATEN, name).default
    tensors = [X.abs().to(dtype), X.flip(0).to(dtype)][: 2 if "_backward" in name else 1]
    expected = op(*tensors, *CONSTANTS.get(name, ()))
    sibling = _sibling(op)
    assert sibling
    target, out = sibling
    for at, tensor in enumerate(tensors if out else tensors[:1]):
        over = tensor.clone()
        args = [*tensors[:at], over, *tensors[at + 1 :], *CONSTANTS.get(name, ())]
        given = target(*args, **({out: over} if out else {}))
        assert given.data_ptr() == over.data_ptr()
        assert torch.equal(given, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_numbers_are_rounded_alike_in_place(name: str, dtype: torch.dtype) -> None:
    op, number, x = getattr(ATEN, name).Scalar, 2 / 3, X.to(dtype)
    sibling = _sibling(op)
    assert sibling
    assert torch.equal(sibling[0](x.clone(), number), op(x, number))


def test_sums_of_gradients_and_chains_write_over_what_dies() -> None:
    names = overwritten(lambda y, w: torch.relu(y) + torch.sigmoid(y) + y @ w)
    assert {
        "aten_add__Tensor",
        "aten_threshold_backward_grad_input",
        "aten_sigmoid_backward_grad_input",
    } <= set(names)


@pytest.mark.parametrize(
    "body",
    [
        lambda y, w: y * y,  # twice the same operand
        lambda y, w: y + y.t()[:48, :48].sum(),
        lambda y, w: (y[:24] + y[24:]) * 2,  # parts of a storage
        lambda y, w: y.sum(0) + y,  # broadcast
        lambda y, w: (y > 0) * y,  # another type
        lambda y, w: y.t() + y.t().contiguous(),  # another layout
        lambda y, w: torch.relu(w + 1) * w + w.t() + y.sum(),  # a parameter
        lambda y, w: torch.native_dropout(y, 0.5, False)[0] + 1 + y,
        lambda y, w: functional.dropout(y, 0.5) + y,
        lambda y, w: _narrow_images(y, w),
        lambda y, w: torch.cumsum(y, 0).mul(y).tanh().exp(),
        lambda y, w: torch.view_as_real(_complex(y).exp()),  # products whose bits go by the order
        lambda y, w: torch.view_as_real(
            _complex(y) / _complex(w) / _complex(y).flip(1)
        ),  # quotients have others in place
    ],
)
def test_awkward_operands_keep_their_values(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    overwritten(body)


def test_what_comes_in_and_what_goes_out_is_never_written_over() -> None:
    model = Plain(lambda y, w: (y + 1) * 2)
    x = X.clone()
    planned = rematplan.plan_module(model, (x,), budget="100%", strategy="store_all", costs="roofline")
    out = planned(x)
    gradient = torch.ones_like(out)
    kept = out.detach().clone()
    out.backward(gradient)
    assert torch.equal(x, X)
    assert torch.equal(out, kept)
    assert torch.equal(gradient, torch.ones_like(out))


@pytest.mark.parametrize("name", " ".join(SIBLINGS).split())
def test_writing_over_an_operand_allocates_nothing(name: str) -> None:
    tensors = [X.abs(), X.flip(0)][: 2 if "_backward" in name else 1]
    sibling = _sibling(getattr(ATEN, name).default)
    assert sibling
    target, out = sibling
    given = {out: tensors[0]} if out else {}
    peak, _ = peak_above_entry(
        lambda: target(*tensors, *CONSTANTS.get(name, ()), **given), torch.device("cpu")
    )
    assert peak == 0


def test_an_op_that_needs_a_new_tensor_also_in_place_overwrites_nothing() -> None:
    over, op = X.abs() + 3, ATEN.mvlgamma.default
    assert op in BUFFERED
    peak, _ = peak_above_entry(lambda: over.mvlgamma_(2), torch.device("cpu"))
    assert peak >= over.nbytes
    model = Plain(lambda y, w: torch.mvlgamma(y.abs() + 3, 2))
    planned = rematplan.plan_module(model, (X,), budget="100%", strategy="store_all", costs="roofline")
    planned(X)
    assert "aten_mvlgamma(" in planned.source


class Tiles(torch.autograd.Function):
    """The logarithm of the sum of exponentials of a product, tile by tile in one buffer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        tile, total = h.new_empty(len(h), len(w)), h.new_zeros(len(h))
        for at in range(0, len(w), 16):
            torch.mm(h, w[at : at + 16].t(), out=tile[:, at : at + 16])
            total += tile[:, at : at + 16].exp().sum(-1)
        return total.log()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h, w = ctx.saved_tensors
        tile, dh, dw = h.new_empty(len(h), len(w)), torch.zeros_like(h), torch.zeros_like(w)
        for at in range(0, len(w), 16):
            part = tile[:, at : at + 16]
            torch.mm(h, w[at : at + 16].t(), out=part)
            part.exp_().mul_(g[:, None])
            dh.addmm_(part, w[at : at + 16])
            dw[at : at + 16].addmm_(part.t(), h)
        return dh, dw


def _rows(y: Tensor, w: Tensor) -> Tensor:
    """Each row is of the row before it."""
    out = y.new_zeros(5, *y.shape)
    for at in range(5):
        out[at] = y = y @ w
    return out


def _diagonal(y: Tensor, w: Tensor) -> Tensor:
    out = w.new_zeros(64, 64)
    out.diagonal().copy_(y.sum(0))
    return y @ out


@pytest.mark.parametrize(
    ("body", "part"),
    [(lambda y, w: Tiles.apply(y, w), "slice"), (_rows, "select"), (_diagonal, "diagonal")],
    ids=["tiles", "rows", "diagonal"],
)
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_a_part_of_a_buffer_is_written_in_place(
    body: Callable[[Tensor, Tensor], Tensor], part: str, budget: str
) -> None:
    plain = Plain(body)
    model, strategy = copy.deepcopy(plain), "approx_dp" if budget == "min" else "store_all"
    planned = rematplan.plan_module(model, (X,), budget=budget, strategy=strategy, costs="roofline")
    for retained in (False, True, False):
        for one in (plain, planned):
            one.zero_grad()
            loss = one(X).pow(2).mean()
            loss.backward(retain_graph=retained)
            if retained:
                loss.backward()
        assert torch.equal(plain.weight.grad, planned.weight.grad)
    assert f"write_{part}(" in planned.source
    if part == "slice" and budget == "100%":
        assert "slice_scatter(" not in planned.source
