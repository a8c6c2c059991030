"""Kernels of Triton and ops that write into their arguments are planned as ops with new results, bit-equal."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_bits import equal_after
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError
from rematplan.module.captures import capture_call
from rematplan.runtime.capture.patches.kernel_writes import written_parameters
from rematplan.runtime.capture.patches.recorded_writes import python_function

triton = pytest.importorskip("triton", reason="PyTorch has Triton on Linux only")
tl = pytest.importorskip("triton.language")
pytest.importorskip("triton.tools.tensor_descriptor")
WIDTH = 32


def gate(x):
    return x / (1 + tl.exp(-x))


def gated(a_ptr, b_ptr, c_ptr, stride, width: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, width)
    tl.store(c_ptr + at, gate(tl.load(a_ptr + at)) * tl.load(b_ptr + at))


def gated_backward(dc_ptr, a_ptr, b_ptr, stride, width: tl.constexpr):
    a_ptr += tl.program_id(0) * stride
    b_ptr += tl.program_id(0) * stride
    columns = tl.arange(0, width)
    dc, a = tl.load(dc_ptr + tl.program_id(0) * stride + columns), tl.load(a_ptr + columns)
    b, s = tl.load(b_ptr + columns), 1 / (1 + tl.exp(-a))
    tl.store(a_ptr + columns, dc * b * s * (1 + a * (1 - s)))
    tl.store(b_ptr + columns, dc * a * s)


def doubled(x_ptr, y_ptr, stride, width: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, width)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton interpret kernels on the CPU."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        for name in ("gate", "gated", "gated_backward", "doubled"):
            monkeypatch.setitem(globals(), name, triton.jit(globals()[name]))


class Gated(torch.autograd.Function):
    """A gate by kernels. The backward writes the gradients into the saved tensors, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        c = torch.empty_like(a)
        gated[(len(a),)](a, b, c, c.stride(0), width=a.shape[-1])
        ctx.save_for_backward(a, b)
        return c

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gated_backward[(len(a),)](gradient.contiguous(), a, b, a.stride(0), width=a.shape[-1])
        return a, b


class Blocks(nn.Module):
    """Blocks with a gate by kernels."""

    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor] = Gated.apply, depth: int = 2) -> None:
        super().__init__()
        self.gate = gate
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            a, b = up(x).chunk(2, -1)
            x = x + down(self.gate(a.contiguous(), b.contiguous()))
        return x.square().mean()


def check_same_bits(plain: nn.Module, x: Tensor, budget: str = "min") -> None:
    """Check loss and gradients of two planned steps against eager mode."""
    planned = rematplan.plan_module(copy.deepcopy(plain), (x,), budget=budget, costs="roofline")

    for _ in range(2):
        equal_after(lambda model: trained(model, x), planned, plain)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss: Tensor = model(x)
    loss.backward()
    return [loss.detach()]


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_kernels_in_functions_are_planned(budget: str) -> None:
    torch.manual_seed(0)
    plain, x = Blocks(), torch.randn(4, WIDTH)
    check_same_bits(plain, x, budget)
    names = [str(call.target) for call in capture_call(plain, (x,), {})[1].calls]
    for kernel in ("gated.written", "gated_backward.written"):
        assert sum(name.startswith(f"{kernel}.") for name in names) == 2
    assert not any("empty" in name for name in names)  # the kernel's op makes what it fills


def into_part(a: Tensor, b: Tensor) -> Tensor:
    both = torch.zeros(2, *a.shape)
    with torch.no_grad():
        doubled[(len(a),)](a, both[1], a.stride(0), width=WIDTH)
    return both[1] * b


def onto_zeros(a: Tensor, b: Tensor) -> Tensor:
    c = torch.zeros_like(a)
    doubled[(len(a) // 2,)](a.detach(), c, a.stride(0), width=WIDTH)
    return c * b


class Turned(torch.autograd.Function):
    """Writes into a copy in another order, as rotary embeddings by kernels do."""

    @staticmethod
    def forward(_ctx: Any, a: Tensor) -> Tensor:
        c = a.view(2, -1, WIDTH).transpose(0, 1).contiguous()
        rows = 2 * len(c) * WIDTH
        doubled[lambda given: (rows // given["width"],)](c, c, WIDTH, width=WIDTH)
        return c.transpose(0, 1).reshape(-1, WIDTH)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def in_a_copy(a: Tensor, b: Tensor) -> Tensor:
    c: Tensor = Turned.apply(a)
    return c * b


def in_place(a: Tensor, b: Tensor) -> Tensor:
    c = (a * b).detach()
    doubled[(len(a),)](c, c, a.stride(0), width=WIDTH)
    return c * a


@torch.library.custom_op("rematplan_tests::halve_", mutates_args={"x"})
def halve_(x: Tensor, scale: float) -> Tensor:
    x.mul_(scale)
    return x.sum(-1, keepdim=True)


@halve_.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], 1)


@torch.library.custom_op("rematplan_tests::halves_", mutates_args={"x"})
def halves_(x: Tensor) -> list[Tensor]:
    x.mul_(0.5)
    return [x.clone(), x.sum()]


@halves_.register_fake
def _(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x), x.new_empty(())]


@torch.library.custom_op("rematplan_tests::spread_", mutates_args={"all_of"})
def spread_(x: Tensor, all_of: list[Tensor], scale: Tensor | None = None) -> None:
    for at, one in enumerate(all_of):
        one.copy_(x + at if scale is None else x * scale)


def into_a_list(a: Tensor, b: Tensor) -> Tensor:
    made = [torch.empty_like(a), torch.zeros_like(a)]
    spread_(a.detach(), made)
    return made[0] * b + made[1]


def test_an_op_that_writes_and_returns_a_list_has_no_plan() -> None:
    def by_list(a: Tensor, b: Tensor) -> Tensor:
        halves: list[Tensor] = halves_((a * b).detach())
        return halves[0] * a

    with pytest.warns(UserWarning, match="writes into its arguments and returns more than tensors"):
        rematplan.plan_module(Blocks(by_list), (torch.randn(8, WIDTH),), budget="min")


def by_op(a: Tensor, b: Tensor) -> Tensor:
    c = (a * b).detach()
    total = halve_(c, 0.5)
    return c * a + total


@torch.library.triton_op("rematplan_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.library.wrap_triton(doubled)[(len(x),)](x, y, x.stride(0), width=WIDTH)
    return y


def by_wrapped_kernel(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        c: Tensor = twice(a * b)
    return c * a


WRITING = (into_part, into_a_list, onto_zeros, in_a_copy, in_place, by_op, by_wrapped_kernel)


@pytest.mark.parametrize("gate", [onto_zeros, in_a_copy])
def test_what_is_made_to_be_written_is_made_once(gate: Callable[[Tensor, Tensor], Tensor]) -> None:
    step = capture_call(Blocks(gate, depth=1), (torch.randn(16, WIDTH),), {})[1]
    (written,) = (call for call in step.calls if str(call.target).startswith("doubled.written"))
    (size,) = {step.storage_bytes[storage] for storage in step.writes(written)}
    others = [
        c for c in step.calls if not c.backward and str(c.target).startswith(("aten.zeros", "aten.clone"))
    ]
    assert size == 16 * WIDTH * 4
    assert len(others) == 2 + (gate is in_a_copy)  # two of the model, and that of the reshape


@pytest.mark.parametrize("gate", WRITING)
def test_writes_into_parts_and_into_what_is_read(gate: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check_same_bits(Blocks(gate), torch.randn(4, WIDTH))


def test_a_kernel_that_writes_into_a_part_of_another_argument_has_no_plan() -> None:
    def overlapping(a: Tensor, b: Tensor) -> Tensor:
        c = (a * b).detach()
        doubled[(len(a) - 1,)](c[1:], c[:-1], a.stride(0), width=WIDTH)
        return c * a

    with pytest.warns(UserWarning, match="doubled writes into a tensor of which another argument is a part"):
        rematplan.plan_module(Blocks(overlapping), (torch.randn(8, WIDTH),), budget="min")


def test_tensors_in_objects_are_refused() -> None:
    def described_by_the_host(a: Tensor, b: Tensor) -> Tensor:
        c = torch.empty_like(a)
        target = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(c, [1, WIDTH])
        doubled[(len(a),)](a.detach(), target, a.stride(0), width=WIDTH)
        return c * b

    with pytest.raises(ModelError, match="doubled gets a tensor inside of a TensorDescriptor"):
        rematplan.plan_module(Blocks(described_by_the_host), (torch.randn(8, WIDTH),), budget="min")


def test_every_size_gets_a_plan() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    planned = rematplan.plan_module(
        copy.deepcopy(plain), (torch.randn(4, WIDTH),), budget="100%", costs="roofline"
    )
    for rows in (4, 6, 4):
        x = torch.randn(rows, WIDTH)
        equal_after(lambda model, x=x: trained(model, x), planned, plain)


def branches(x_ptr, y_ptr, z_ptr, index_ptr, n, flag: tl.constexpr):
    for row in range(n):
        p = x_ptr + row if flag else y_ptr + row
        if tl.load(z_ptr + row) > 0:
            tl.atomic_add(p + tl.load(index_ptr + row), 1.0)


def by_helper(x_ptr, y_ptr, n):
    other = doubled
    doubled(y_ptr, x_ptr, n, width=8)
    return other


def unknown(x_ptr, y_ptr):
    print(tl.load(y_ptr))
    check_same_bits(x_ptr, 1)


def described(x_ptr, y_ptr, n):
    source = tl.make_tensor_descriptor(x_ptr, shape=[n], strides=[1], block_shape=[8])
    target = tl.make_tensor_descriptor(y_ptr, shape=[n], strides=[1], block_shape=[8])
    target.store([0], source.load([0]))


class Target:
    """A class of values with a method that writes."""


def by_method(x_ptr, y_ptr, n):
    target = Target(x_ptr, n)
    target.put(tl.load(y_ptr))


def by_alias(x_ptr, y_ptr, z_ptr):
    language = tl
    language.store(x_ptr, tl.load(y_ptr).to(y_ptr.dtype.element_ty))
    if y_ptr.dtype.element_ty.is_fp8():
        tl.atomic_store(z_ptr, 1)


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        (gated, {"c_ptr"}),
        (gated_backward, {"a_ptr", "b_ptr"}),
        (branches, {"x_ptr", "y_ptr"}),
        (by_helper, {"x_ptr"}),
        (unknown, {"x_ptr"}),
        (described, {"y_ptr"}),
        (by_method, {"x_ptr"}),
        (by_alias, {"x_ptr", "z_ptr"}),
    ],
)
def test_what_a_kernel_writes_is_read_off_its_source(kernel: Any, written: set[str]) -> None:
    function = python_function(kernel)
    assert function is not None
    assert {name for name in written_parameters(function) if name.endswith("_ptr")} == written
