"""Give each output of a captured step a separate storage: remove needless copies and add missing ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import (
    GRADIENT_OF,
    Call,
    CapturedStep,
    Ref,
    Value,
    free_name,
    refs,
    single_call,
)
from rematplan.runtime.graph.compat import disable_current_modes
from rematplan.runtime.graph.storage_slices import has_strides, is_dense

CLONE = torch.ops.aten.clone.default
PERMUTE = torch.ops.aten.permute.default


def without_copies(step: CapturedStep) -> CapturedStep:
    """Return the step with the sources of needless clones, made by `FlatModel`, as outputs instead of the clones. A
    clone is needed if a call reads it, or if its source has other strides, is lazy, partial, an input or another
    output."""
    values, outputs = step.values, []
    used = {values[i.value].storage for i in step.inputs} | {values[o.value].storage for o in step.outputs}
    read = {r for call in step.calls for r in call.operands}
    for output in step.outputs:
        copy = values[output.value]
        call = step.call.get(copy.call or "")
        if output.kind == "output" and call and call.target is CLONE and output.value not in read:
            source = values[next(refs(call.args)).value]
            lazy = source.fake.is_conj() or source.fake.is_neg()
            free = is_whole(source) and source.storage not in used
            if free and not lazy and source.fake.stride() == copy.fake.stride():
                output = replace(output, value=source.name)
                used.add(source.storage)
        outputs.append(output)
    return replace(step, outputs=tuple(outputs))


def without_saved_copies(step: CapturedStep) -> CapturedStep:
    """Return the step in which the backward reads the sources of copies that autograd made because an op overwrites the
    sources (``SiLU`` in place). In a captured step, ops do not overwrite what others read."""
    source_of = dict(_saved_copies(step))
    calls = (call.reading(lambda name: source_of.get(name, name)) for call in step.calls)
    return replace(step, calls=tuple(calls)) if source_of else step


def _saved_copies(step: CapturedStep) -> Iterator[tuple[str, str]]:
    """Yield the names of copies in a forward that its backward alone reads, and of their sources. Such a copy belongs
    to the autograd node of a forward op that also reads the source."""
    kept = step.given() | step.returned()
    for call in step.calls:
        if call.target is CLONE and call.backward and call.sequence is not None:
            (copy,) = (step.values[name] for name in call.made)
            source = step.values[next(refs(call.args)).value]
            nodes = {r.sequence for r in step.readers[source.name] if not r.backward}
            alike = is_whole(source) and source.fake.stride() == copy.fake.stride()
            if call.sequence in nodes and alike and not kept & {copy.storage, source.storage}:
                yield copy.name, source.name


def is_whole(value: Value) -> bool:
    """Return whether a value's storage has exactly as many bytes as the value's elements, so that it contains no
    others."""
    return value.fake.untyped_storage().nbytes() == value.fake.numel() * value.fake.element_size()


def with_own_outputs(step: CapturedStep, leaves: bool = False) -> CapturedStep:
    """Return the step in which every output has a separate dense storage. Copies are added for outputs that have none,
    and for parameters' gradients in another layout than autograd would store. ``leaves``: whether that also concerns
    gradients of the batch, as of a pipeline stage's inputs."""
    used = {*step.given()}
    learned = ("parameter", "batch") if leaves else ("parameter",)
    inputs = {
        (GRADIENT_OF[i.kind], i.target): step.values[i.value].fake for i in step.inputs if i.kind in learned
    }
    values, outputs = dict(step.values), []
    copies: dict[str | None, list[Call]] = {}  # by the call that makes what is copied
    for output in step.outputs:
        value = values[output.value]
        of = inputs.get((output.kind, output.target))
        if (
            value.storage in used
            or not is_whole(value)
            # Autograd would copy such a gradient itself (``AccumulateGrad``'s layout contract), beyond the planned
            # memory, and cannot add to an expanded one.
            or (of is not None and not has_strides(value.fake, _dense_strides(of)))
        ):
            name = free_name(re.sub(r"\W", "_", f"own_{output.kind}_{output.target}"), values)
            calls, made = _copy(value, name, of, "gradient" in output.kind)
            copies.setdefault(value.call, []).extend(calls)
            values |= {one.name: one for one in made}
            output = replace(output, value=name)
        used.add(values[output.value].storage)
        outputs.append(output)
    calls = [*copies.pop(None, [])]
    for call in step.calls:
        calls += [call, *copies.get(call.name, [])]
    return replace(step, calls=tuple(calls), values=values, outputs=tuple(outputs))


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if its elements fill a block of memory without gaps, else those of a contiguous
    tensor."""
    if is_dense(parameter):
        return parameter.stride()
    return tuple(math.prod(parameter.shape[d + 1 :]) for d in range(parameter.dim()))


def _copy(
    value: Value, name: str, like: torch.Tensor | None, backward: bool
) -> tuple[list[Call], list[Value]]:
    """Return the calls that copy a value, in the strides of ``like`` if given, and the values that they make, the copy,
    called ``name``, last."""
    dims = list(range(value.fake.dim()))
    strides = [0 for _ in dims] if like is None else _dense_strides(like)
    order = sorted(dims, key=lambda d: -strides[d])
    calls, made = list[Call](), [value]

    def then(result: str, target: Any, fake: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        last, view = made[-1], target is PERMUTE
        calls.append(
            single_call(result, target, (Ref(last.name), *args), kwargs, is_view=view, backward=backward)
        )
        made.append(Value(result, last.storage if view else result, result, fake))

    contiguous = torch.contiguous_format
    with torch.no_grad(), disable_current_modes():
        turned = value.fake.permute(order)
        copied = torch.empty_like(turned, memory_format=contiguous)
        if order == dims:
            then(name, CLONE, copied, memory_format=contiguous)
        else:
            back = sorted(dims, key=order.__getitem__)
            then(f"{name}_turned", PERMUTE, turned, order)
            then(f"{name}_copied", CLONE, copied, memory_format=contiguous)
            then(name, PERMUTE, copied.permute(back), back)
    return calls, made[1:]
