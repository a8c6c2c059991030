"""Each rule of the table: an op that is run in parts, along every axis that the table allows, computes what the whole
op computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from axis_cases import CASES, d, x0, x1, x2
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
from rematplan.runtime.split.axis_spans import AxisSpan, axes_of
from rematplan.runtime.split.regions import SplitRegion
from rematplan.runtime.split.rule_functions import LOSS, SUM
from rematplan.runtime.split.split_step import CannotSplit, split_regions
from rematplan.runtime.split.split_table import RULES, states_of

A = torch.ops.aten
FAKES = FakeTensorMode()
CONTIGUOUS = {"memory_format": torch.contiguous_format}


def step_of(
    target: Any, args: tuple[Any, ...], tensors: list[Tensor], kwargs: Mapping[str, Any] | None = None
) -> CapturedStep:
    """A step of one call. Its arguments name their tensors ``x0``, ``x1``, ..."""
    mode = FAKES
    fakes = {f"x{k}": mode.from_tensor(t) for k, t in enumerate(tensors)}
    with mode:
        given, named = substitute((args, kwargs or {}), fakes.__getitem__)
        made = target(*given, **named)
    single = isinstance(made, Tensor)
    results = tuple(f"y{k}" for k in range(1 if single else len(made)))
    values = {name: Value(name, name, None, fake) for name, fake in fakes.items()}
    shared = {fake.untyped_storage()._cdata: name for name, fake in fakes.items()}
    for name, fake in zip(results, [made] if single else made, strict=True):
        storage = shared.setdefault(fake.untyped_storage()._cdata, name)
        values[name] = Value(name, storage, "call", fake)
    is_view = any(values[r].storage != r for r in results)
    call = Call("call", target, args, kwargs or {}, results, single=single, is_view=is_view)
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


def check_axes(
    parts: int,
    target: Any,
    args: tuple[Any, ...],
    tensors: list[Tensor],
    kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Split the op along every axis of every tensor that the table allows, and compare. Return how many there were."""
    step, found = step_of(target, args, tensors, kwargs), 0
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


def test_every_rule_is_tested() -> None:
    named = {name.partition(" ")[0] for name in CASES}
    assert {str(packet).removeprefix("aten.") for packet in RULES} <= named


@pytest.mark.parametrize("name", CASES)
def test_parts_along_each_axis_of_a_row_compute_what_the_whole_op_computes(name: str) -> None:
    least, case = CASES[name]
    assert check_axes(2, *case(6, 5, 4)) >= least
    check_axes(4, *case(9, 1, 7))  # uneven parts, an axis of one index


def test_an_op_without_a_row_cannot_be_split() -> None:
    step = step_of(A.sort.default, (x0, 1), [d(4, 5)])
    assert states_of(step, step.calls[0], {"x0": AxisSpan(0, 0)}, 4) is None


def test_a_bias_is_not_added_once_a_part() -> None:
    step = step_of(A.addmm.default, (x0, x1, x2), [d(5), d(4, 6), d(6, 5)])
    assert states_of(step, step.calls[0], {"x1": AxisSpan(1, 1)}, 6) is None


def test_a_mean_along_the_axis_is_a_sum_over_parts() -> None:
    for step in (step_of(A.mean.dim, (x0, [0]), [d(4, 6)]), step_of(A.sum.dim_IntList, (x0, [0]), [d(4, 6)])):
        assert states_of(step, step.calls[0], {"x0": AxisSpan(0, 0)}, 4) == {"x0": AxisSpan(0, 0), "y0": SUM}


def test_a_loss_in_half_precision_is_no_sum_over_parts() -> None:
    """The sum of a part would be rounded to few digits, and could be too large for the type."""
    for target in (A.mse_loss.default, A.binary_cross_entropy_with_logits.default):
        step = step_of(target, (x0, x1), [d(4, 6).half(), d(4, 6).half()])
        assert states_of(step, step.calls[0], {"x0": AxisSpan(0, 0)}, 4) is None


def test_heads_that_share_keys_are_no_axis_of_attention() -> None:
    attention = A._scaled_dot_product_flash_attention_for_cpu.default
    step = step_of(attention, (x0, x1, x2), [d(2, 4, 5, 8), d(2, 2, 5, 8), d(2, 2, 5, 8)])
    assert states_of(step, step.calls[0], {"x0": AxisSpan(1, 1)}, 4) is None
    assert states_of(step, step.calls[0], {"x0": AxisSpan(0, 0)}, 2) is not None


def test_an_empty_tensor_without_dimensions_of_its_own_may_be_joined() -> None:
    """As the caches of keys and values of some models are at first."""
    step = step_of(A.cat.default, ([x0, x1], -1), [d(0), d(2, 6, 5)])
    assert states_of(step, step.calls[0], {"x1": AxisSpan(1, 1)}, 6) == {
        "x1": AxisSpan(1, 1),
        "y0": AxisSpan(1, 1),
    }
