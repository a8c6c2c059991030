"""Roofline costs against formulas by hand; measurement against sizes known beforehand."""

import json
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import rematplan
from rematplan.ir import UsageError
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.device_models import DEVICE_MODELS, device_model
from rematplan.runtime.costs.measure import interleaved_seconds, peak_above_entry
from rematplan.runtime.costs.profile import profile_costs, signature
from rematplan.runtime.costs.roofline import flops, moved_bytes, roofline_costs
from rematplan.runtime.graph.captured_step import CapturedStep


class OneOp(nn.Module):
    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x).sum()


def step_of(op: nn.Module, *shape: int) -> CapturedStep:
    return capture(OneOp(op), (torch.randn(*shape),), "one op")


def total(step: CapturedStep, part: str) -> float:
    return sum(flops(step, c) for c in step.calls if part in c.name and not c.is_view)


@pytest.mark.parametrize(
    ("op", "shape", "forward"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 10, 10), 2 * (2 * 8 * 10 * 10) * 3 * 9),
        (nn.Conv2d(8, 8, 3, groups=8), (2, 8, 10, 10), 2 * (2 * 8 * 8 * 8) * 9),
        (nn.Conv2d(8, 8, 3, stride=2, groups=2), (2, 8, 9, 9), 2 * (2 * 8 * 4 * 4) * 4 * 9),
        (nn.ConvTranspose2d(8, 4, 2, stride=2), (2, 8, 5, 5), 2 * (2 * 8 * 5 * 5) * 4 * 4),
        (nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), (2, 8, 5, 5), 2 * (2 * 8 * 5 * 5) * 2 * 4),
    ],
)
def test_convolution_flops(op: nn.Module, shape: tuple[int, ...], forward: int) -> None:
    step = step_of(op, *shape)
    backward = [c for c in step.calls if c.name == "convolution_backward"]
    assert sum(flops(step, c) for c in step.calls if c.name == "convolution") == forward
    # The batch needs no gradient in a training step: only the weight's, as costly as the forward, and the bias's sum.
    grad = step.values[next(iter(r.value for r in backward[0].args[:1]))].fake.numel()
    assert sum(flops(step, c) for c in backward) == forward + grad


def test_matrix_flops_agree_with_torch_s_counter() -> None:
    model = OneOp(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = torch.randn(4, 7)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    step = capture(model, (x,), "linear")
    assert total(step, "mm") == counter.get_total_flops()


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q * self.w, q, q).sum()


def test_attention_is_charged() -> None:
    step = capture(Attend(), (torch.randn(2, 4, 16, 8),), "attention")
    forward = 2.0 * (2 * 4 * 16) * 16 * (8 + 8)
    calls = [c for c in step.calls if "attention" in c.name]
    assert [flops(step, c) for c in calls] == [forward, 2.5 * forward]


def test_broadcast_reads_count_once() -> None:
    step = step_of(nn.Linear(4, 6, bias=False), 3, 4)
    expanded = next(c for c in step.calls if c.is_view and "expand" in c.name)
    reader = step.readers[expanded.results[0]][0]
    assert moved_bytes(step, reader) < 4 * (3 * 6 + 3 * 4 + 6 * 4 + 3 * 6)


@pytest.mark.parametrize("name", DEVICE_MODELS)
def test_roofline_is_positive_and_faster_devices_are_faster(name: str) -> None:
    step = step_of(nn.Conv2d(16, 16, 3), 8, 16, 32, 32)
    costs = roofline_costs(step, device_model(name))
    assert set(costs) == {c.name for c in step.calls if not c.is_view}
    assert all(c.time >= device_model(name).launch for c in costs.values())


def test_a_file_describes_a_device(tmp_path: Path) -> None:
    a100, file = DEVICE_MODELS["a100"], tmp_path / "mine.json"
    written = {"flops": dict(a100.flops), "bandwidth": a100.bandwidth, "launch": a100.launch}
    file.write_text(json.dumps(written))
    mine = device_model(str(file))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        assert mine.time(1e9, 1e6, dtype) == a100.time(1e9, 1e6, dtype)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[1]", "needs positive numbers"),
        ('{"flops": {"float16": 1}, "bandwidth": 1, "launch": 1}', "needs positive numbers"),
        ('{"flops": {"float32": 1}, "bandwidth": -1, "launch": 1}', "needs positive numbers"),
        ('{"flops": {"float32": "fast"}, "bandwidth": 1, "launch": 1}', "needs positive numbers"),
    ],
)
def test_a_wrong_file_of_a_device_is_refused_in_one_line(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=said) as refused:
        device_model(str(file))
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_device_models_are_listed() -> None:
    with pytest.raises(UsageError, match="h100"):
        device_model("abacus")


class Halves(nn.Module):
    """Computes alike on both halves of a product; where they begin depends on the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linear(x).chunk(2, 1)
        return first.tanh().sum() + second.tanh().sum()


@pytest.mark.parametrize(("width", "classes"), [(16, 1), (5, 2)])
def test_parts_of_a_tensor_that_are_aligned_alike_are_measured_once(width: int, classes: int) -> None:
    step = capture(Halves(width), (torch.randn(3, 4),), "halves")
    assert (
        len({signature(step, c) for c in step.calls if "tanh" in c.name and "backward" not in c.name})
        == classes
    )


class Conjugating(nn.Module):
    """Multiplies by a lazy conjugate, and by an imaginary part of it, which is a lazy negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.conj().expand(2, -1, -1)).abs() + x.real @ self.weight.conj().imag


def test_what_kernels_take_to_resolve_lazy_conjugates_and_negatives_is_measured(tmp_path: Path) -> None:
    step = capture(Conjugating(), (torch.randn(2, 8, 64, dtype=torch.complex64),), "conjugating")
    costs = profile_costs(step, cache=tmp_path)
    lazy = {
        call.name: sum(t.nbytes for t in read if t.is_conj() or t.is_neg())
        for call in step.calls
        if "mm" in call.name and (read := [step.values[name].fake for name in call.operands])
    }
    assert max(lazy.values()) >= 2 * 64 * 64 * 8
    assert all(costs[name].workspace >= resolved for name, resolved in lazy.items())


class OfPlaces(nn.Linear):
    """Picks by an order that is known before the step runs, and gives whole numbers that an inverse may bring back."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        picked = y[:, torch.arange(7, -1, -1)]
        return picked.tanh(), *functional.adaptive_max_pool1d(y, 3, return_indices=True)


def test_what_is_known_before_the_step_is_profiled_with_it() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*cannot be profiled")
        planned = rematplan.plan_module(OfPlaces(4, 8), (torch.randn(2, 4),), budget="100%", inverses=True)
    picked, _, places = planned(torch.randn(2, 4))
    picked.sum().backward()
    assert places.dtype == torch.int64


class Marked(nn.Linear):
    """Picks the rows that the batch marks, as a masked language model does."""

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        return super().forward(x)[marks].tanh()


def test_masks_are_profiled_with_as_many_marks_as_they_have() -> None:
    marks = torch.arange(24).view(4, 6) % 5 == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*cannot be profiled")
        planned = rematplan.plan_module(Marked(4, 8), (torch.randn(4, 6, 4), marks), budget="100%")
    assert planned(torch.randn(4, 6, 4), marks).shape == (5, 8)


class Asserting(nn.Module):
    """Checks activations in ways that have either outcome."""

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.aminmax()
        if low > high:
            raise AssertionError("the range is empty")
        if not (x < 1e9).all():
            raise TypeError("too large")
        return x.nan_to_num() if x.isnan().any() else x * 2


def test_checks_are_profiled_with_the_outcomes_that_they_expect() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Asserting()), torch.randn(8, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*cannot be profiled")
        planned = rematplan.plan_module(model, (x,), budget="200%", refine=False)
    assert sum("check_" in line for line in rematplan.planning(planned).source.splitlines()) >= 3
    assert torch.equal(planned(x), model(x))


def test_costs_are_measured_while_somebody_profiles(tmp_path: Path) -> None:
    x = torch.randn(4, 3, 9, 9)
    step = capture(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Softmax(1)), (x,), "convolution")
    expected = profile_costs(step, cache=tmp_path / "alone")
    with warnings.catch_warnings(), torch.profiler.profile(profile_memory=True) as others:
        warnings.simplefilter("error")
        found = profile_costs(step, cache=tmp_path / "beside")
        x.exp()
    assert {name: cost.workspace for name, cost in found.items()} == {
        name: cost.workspace for name, cost in expected.items()
    }
    assert any(cost.workspace for cost in found.values())
    assert {event.key for event in others.key_averages()} & {"aten::exp", "aten::convolution"} == {
        "aten::exp"
    }


def test_peak_counts_what_is_held_at_once() -> None:
    def call() -> Tensor:
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        return b

    peak, result = peak_above_entry(call, torch.device("cpu"))
    assert peak == 6000
    assert result.numel() == 500


def test_calls_are_timed_alternately() -> None:
    order: list[str] = []
    calls = {"slow": lambda: (order.append("slow"), time.sleep(0.02)), "fast": lambda: order.append("fast")}
    best = interleaved_seconds(calls, torch.device("cpu"), rounds=2)
    assert order == ["slow", "fast"] * 3
    assert best["slow"] > 0.02 > best["fast"]
