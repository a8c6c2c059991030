"""Each rule of the table: an op that is run in parts, along every axis that the table allows, computes what the whole
op computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rematplan.runtime.graph.captured_step import (
    Call,
    CapturedStep,
    Ref,
    StepInput,
    StepOutput,
    Value,
    substitute,
)
from rematplan.runtime.graph.compat import FakeTensorMode
from rematplan.runtime.split.axis_rules import LOSS, RULES, SUM, states_of
from rematplan.runtime.split.axis_spans import AxisSpan, axes_of
from rematplan.runtime.split.regions import SplitRegion
from rematplan.runtime.split.split_step import CannotSplit, split_regions

A = torch.ops.aten
CONTIGUOUS = {"memory_format": torch.contiguous_format}


def step_of(target: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> CapturedStep:
    """A step of one call. Its arguments name their tensors ``x0``, ``x1``, ..."""
    mode = FakeTensorMode()
    fakes = {f"x{k}": mode.from_tensor(t) for k, t in enumerate(tensors)}
    with mode:
        made = target(*substitute(args, fakes.__getitem__))
    single = isinstance(made, Tensor)
    results = tuple(f"y{k}" for k in range(1 if single else len(made)))
    values = {name: Value(name, name, None, fake) for name, fake in fakes.items()}
    shared = {fake.untyped_storage()._cdata: name for name, fake in fakes.items()}
    for name, fake in zip(results, [made] if single else made, strict=True):
        storage = shared.setdefault(fake.untyped_storage()._cdata, name)
        values[name] = Value(name, storage, "call", fake)
    is_view = any(values[r].storage != r for r in results)
    call = Call("call", target, args, {}, results, single=single, is_view=is_view)
    # Views are split only as operands of ops; a copy of the view is what is read.
    calls = [call]
    outputs = list(results)
    if is_view:
        for k, r in enumerate(results):
            with mode:
                copy = values[r].fake.contiguous().clone()
            values[f"z{k}"] = Value(f"z{k}", f"z{k}", f"copy{k}", copy)
            calls.append(Call(f"copy{k}", A.clone.default, (Ref(r),), CONTIGUOUS, (f"z{k}",)))
        outputs = [f"z{k}" for k in range(len(results))]
    inputs = tuple(StepInput("batch", str(k), name) for k, name in enumerate(fakes))
    return CapturedStep(
        "one",
        inputs,
        tuple(StepOutput("output", str(k), r) for k, r in enumerate(outputs)),
        tuple(calls),
        values,
        {},
    )


def run(step: CapturedStep, tensors: list[Tensor]) -> list[Tensor]:
    env: dict[str, Any] = {f"x{k}": t for k, t in enumerate(tensors)}
    for call in step.calls:
        args, kwargs = substitute((call.args, call.kwargs), env.__getitem__)
        made = call.target(*args, **kwargs)
        env |= {r: t for r, t in zip(call.results, [made] if call.single else made, strict=True) if r}
    return [env[o.value] for o in step.outputs]


def check_axes(target: Any, args: tuple[Any, ...], tensors: list[Tensor], parts: int) -> int:
    """Split the op along every axis of every tensor that the table allows, and compare. Return how many there were."""
    step, found = step_of(target, args, tensors), 0
    expected = run(step, tensors)
    for value in step.values.values():
        for axis in axes_of(value.fake.shape):
            shape = value.fake.shape[axis.first : axis.last + 1]
            indices = int(torch.Size(shape).numel())
            states = _states(step, value.name, axis, indices)
            if states is None or (LOSS not in states.values() and not _reaches_results(step, states)):
                continue
            calls = tuple(c.name for c in step.calls if not c.is_view)
            region = SplitRegion(indices, calls, states, 0, ())
            try:
                split = split_regions(step, {region: parts})
            except CannotSplit:  # a result of other strides, those of dimensions of size 1
                assert any(1 in v.fake.shape for v in step.values.values())
                continue
            assert indices < 2 or len(split.calls) > len(step.calls)
            for a, b in zip(expected, run(split, tensors), strict=True):
                assert a.shape == b.shape
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
            found += 1
    return found


def _states(step: CapturedStep, value: str, axis: AxisSpan, indices: int) -> dict[str, Any] | None:
    states: dict[str, Any] = {value: axis}
    for _ in range(2):
        for call in step.calls:
            new = states_of(step, call, states, indices)
            states |= new or {}
    return states if all(states_of(step, c, states, indices) for c in step.calls) else None


def _reaches_results(step: CapturedStep, states: Mapping[str, Any]) -> bool:
    return all(o.value in states for o in step.outputs)


def d(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def classes(n: int, c: int) -> Tensor:
    return torch.randint(c, (n,))


def log_probabilities(*shape: int) -> Tensor:
    return torch.log_softmax(d(*shape), 1)


Case = Callable[[int, int, int], tuple[Any, tuple[Any, ...], list[Tensor]]]
x0, x1, x2, x3, x4, x5 = map(Ref, ("x0", "x1", "x2", "x3", "x4", "x5"))
CASES: dict[str, tuple[int, Case]] = {
    "add": (4, lambda a, b, c: (A.add.Tensor, (x0, x1), [d(a, b, c), d(b, c)])),
    "gelu_backward": (3, lambda a, b, c: (A.gelu_backward.default, (x0, x1), [d(a, b, c), d(a, b, c)])),
    "where": (2, lambda a, b, c: (A.where.self, (x0, x1, x2), [d(a, b) > 0, d(a, b), d(b)])),
    "_to_copy": (2, lambda a, b, c: (A._to_copy.default, (x0,), [d(a, b)])),
    "clone": (2, lambda a, b, c: (A.clone.default, (x0,), [d(a, b)])),
    "expand": (2, lambda a, b, c: (A.expand.default, (x0, [a, b, c]), [d(a, b, 1)])),
    "t": (2, lambda a, b, c: (A.t.default, (x0,), [d(a, b)])),
    "transpose": (3, lambda a, b, c: (A.transpose.int, (x0, 0, -1), [d(a, b, c)])),
    "permute": (3, lambda a, b, c: (A.permute.default, (x0, [2, 0, 1]), [d(a, b, c)])),
    "select": (2, lambda a, b, c: (A.select.int, (x0, 1, b - 1), [d(a, b, c)])),
    "unsqueeze": (2, lambda a, b, c: (A.unsqueeze.default, (x0, 1), [d(a, b)])),
    "squeeze": (2, lambda a, b, c: (A.squeeze.dim, (x0, 1), [d(a, 1, b)])),
    "slice": (2, lambda a, b, c: (A.slice.Tensor, (x0, 1, 0, max(1, b - 1)), [d(a, b, c)])),
    "split": (2, lambda a, b, c: (A.split.Tensor, (x0, 1, -1), [d(a, b, c)])),
    "split_with_sizes": (2, lambda a, b, c: (A.split_with_sizes.default, (x0, [1, c], -1), [d(a, b, c + 1)])),
    "cat": (2, lambda a, b, c: (A.cat.default, ([x0, x1], 1), [d(a, b, c), d(a, c, c)])),
    "slice_backward": (
        2,
        lambda a, b, c: (A.slice_backward.default, (x0, [a, b + 2, c], 1, 1, b + 1, 1), [d(a, b, c)]),
    ),
    "_softmax": (2, lambda a, b, c: (A._softmax.default, (x0, 1, False), [d(a, b, c)])),
    "_log_softmax": (2, lambda a, b, c: (A._log_softmax.default, (x0, -1, False), [d(a, b, c)])),
    "_softmax_backward_data": (
        2,
        lambda a, b, c: (
            A._softmax_backward_data.default,
            (x0, x1, -1, torch.float64),
            [d(a, b, c), d(a, b, c)],
        ),
    ),
    "_log_softmax_backward_data": (
        1,
        lambda a, b, c: (
            A._log_softmax_backward_data.default,
            (x0, x1, 1, torch.float64),
            [d(a, b), d(a, b)],
        ),
    ),
    "sum": (3, lambda a, b, c: (A.sum.dim_IntList, (x0, [0, 1], True), [d(a, b, c)])),
    "sum of all": (2, lambda a, b, c: (A.sum.default, (x0,), [d(a, b)])),
    "mean": (2, lambda a, b, c: (A.mean.dim, (x0, [1]), [d(a, b, c)])),
    "amax": (2, lambda a, b, c: (A.amax.default, (x0, [-1]), [d(a, b, c)])),
    "logsumexp": (2, lambda a, b, c: (A.logsumexp.default, (x0, [1], True), [d(a, b, c)])),
    "mm": (6, lambda a, b, c: (A.mm.default, (x0, x1), [d(a, b), d(b, c)])),
    "bmm": (9, lambda a, b, c: (A.bmm.default, (x0, x1), [d(4, a, b), d(4, b, c)])),
    "addmm": (4, lambda a, b, c: (A.addmm.default, (x0, x1, x2), [d(c), d(a, b), d(b, c)])),
    "baddbmm": (6, lambda a, b, c: (A.baddbmm.default, (x0, x1, x2), [d(4, a, c), d(4, a, b), d(4, b, c)])),
    "embedding": (
        2,
        lambda a, b, c: (A.embedding.default, (x0, x1), [d(7, c), classes(a * b, 7).view(a, b)]),
    ),
    "embedding_dense_backward": (
        2,
        lambda a, b, c: (
            A.embedding_dense_backward.default,
            (x0, x1, 7, -1, False),
            [d(a, b, c), classes(a * b, 7).view(a, b)],
        ),
    ),
    "native_layer_norm": (
        2,
        lambda a, b, c: (A.native_layer_norm.default, (x0, [c], x1, x2, 1e-5), [d(a, b, c), d(c), d(c)]),
    ),
    "native_layer_norm_backward": (
        2,
        lambda a, b, c: (
            A.native_layer_norm_backward.default,
            (x0, x1, [c], x2, x3, x4, x5, [True, True, True]),
            [d(a, b, c), d(a, b, c), d(a, b, 1), d(a, b, 1).exp(), d(c), d(c)],
        ),
    ),
    "nll_loss_forward": (
        1,
        lambda a, b, c: (
            A.nll_loss_forward.default,
            (x0, x1, None, 1, -100),
            [log_probabilities(a, b), classes(a, b)],
        ),
    ),
    "nll_loss_forward of weighted classes": (
        1,
        lambda a, b, c: (
            A.nll_loss_forward.default,
            (x0, x1, x2, 1, 1),
            [log_probabilities(a, b), classes(a, b), torch.rand(b, dtype=torch.float64) + 0.1],
        ),
    ),
    "nll_loss_forward of rows": (
        1,
        lambda a, b, c: (
            A.nll_loss_forward.default,
            (x0, x1, None, 0, 0),
            [log_probabilities(a, b), classes(a, b)],
        ),
    ),
    "nll_loss_backward": (
        1,
        lambda a, b, c: (
            A.nll_loss_backward.default,
            (x0, x1, x2, None, 1, 0, x3),
            [d(), log_probabilities(a, b), classes(a, b), torch.tensor(3.0, dtype=torch.float64)],
        ),
    ),
    "nll_loss2d_forward": (
        2,
        lambda a, b, c: (
            A.nll_loss2d_forward.default,
            (x0, x1, None, 2, 0),
            [log_probabilities(a, 3, b, c), classes(a * b * c, 3).view(a, b, c)],
        ),
    ),
    "nll_loss2d_backward": (
        2,
        lambda a, b, c: (
            A.nll_loss2d_backward.default,
            (x0, x1, x2, None, 1, 0, x3),
            [d(), log_probabilities(a, 3, b, c), classes(a * b * c, 3).view(a, b, c), d()],
        ),
    ),
    "convolution": (
        1,
        lambda a, b, c: (
            A.convolution.default,
            (x0, x1, x2, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            [d(a, 2, b, c), d(3, 2, 3, 3), d(3)],
        ),
    ),
    "convolution of pixels": (
        3,
        lambda a, b, c: (
            A.convolution.default,
            (x0, x1, x2, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            [d(a, 2, b, c), d(3, 2, 1, 1), d(3)],
        ),
    ),
    "convolution_backward": (
        3,
        lambda a, b, c: (
            A.convolution_backward.default,
            (x0, x1, x2, [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]),
            [d(a, 3, b, c), d(a, 2, b, c), d(3, 2, 1, 1)],
        ),
    ),
}


def test_every_rule_is_tested() -> None:
    named = {name.partition(" ")[0] for name in CASES}
    assert {str(packet).removeprefix("aten.") for packet in RULES} <= named


@pytest.mark.parametrize("name", CASES)
def test_an_op_can_be_split_along_the_axes_of_its_row(name: str) -> None:
    torch.manual_seed(0)
    least, case = CASES[name]
    assert check_axes(*case(6, 5, 4), 2) >= least


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=2, deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 9)] * 3), parts=st.integers(2, 5))
def test_parts_compute_what_the_whole_op_computes(name: str, sizes: tuple[int, int, int], parts: int) -> None:
    torch.manual_seed(sum(sizes))
    check_axes(*CASES[name][1](*sizes), parts)


def test_an_op_without_a_row_cannot_be_split() -> None:
    step = step_of(A.cumsum.default, (x0, 1), [d(4, 5)])
    assert states_of(step, step.calls[0], {"x0": AxisSpan(0, 0)}, 4) is None


def test_a_bias_is_not_added_once_a_part() -> None:
    step = step_of(A.addmm.default, (x0, x1, x2), [d(5), d(4, 6), d(6, 5)])
    assert states_of(step, step.calls[0], {"x1": AxisSpan(1, 1)}, 6) is None


def test_a_mean_along_the_axis_is_not_the_sum_of_the_means_of_parts() -> None:
    step = step_of(A.mean.dim, (x0, [0]), [d(4, 6)])
    assert states_of(step, step.calls[0], {"x0": AxisSpan(0, 0)}, 4) is None
    total = step_of(A.sum.dim_IntList, (x0, [0]), [d(4, 6)])
    assert states_of(total, total.calls[0], {"x0": AxisSpan(0, 0)}, 4) == {"x0": AxisSpan(0, 0), "y0": SUM}
