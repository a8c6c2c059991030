"""Remove slices of whole dimensions, which eager mode skips in an index ``x[a, b]``, but not a symbolic trace."""

from __future__ import annotations

from dataclasses import replace

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Value
from rematplan.runtime.symbols.expressions import NotSymbolic

SLICE = torch.ops.aten.slice.Tensor
SLICE_BACKWARD = torch.ops.aten.slice_backward.default


def without_full_slices(step: CapturedStep) -> CapturedStep:
    """Return a captured step, read from a trace with symbolic sizes, without whole-dimension slices in an index
    ``x[a, b]`` and their backwards. Raises `NotSymbolic` if such a backward changes the layout."""
    names: dict[str, str] = {}
    storages: dict[str, str] = {}
    gone = set[str]()
    for call in step.calls:
        argument = _same(step, call)
        if argument is not None:
            result = step.values[str(call.results[0])]
            gone.add(call.name)
            names[result.name] = names.get(argument.name, argument.name)
            if result.storage != argument.storage:
                storages[result.storage] = storages.get(argument.storage, argument.storage)
    if not gone:
        return step

    kept = (call for call in step.calls if call.name not in gone)
    return replace(
        step,
        calls=tuple(call.reading(lambda name: names.get(name, name)) for call in kept),
        outputs=tuple(replace(o, value=names.get(o.value, o.value)) for o in step.outputs),
        values={
            name: replace(v, storage=storages.get(v.storage, v.storage))
            for name, v in step.values.items()
            if name not in names
        },
    )


def _same(step: CapturedStep, call: Call) -> Value | None:
    """Return the argument that can replace a call's result, for a whole-dimension slice in an index or its backward;
    else None. Raises `NotSymbolic` if the backward's result has another layout."""
    if not call.indexed or call.target not in (SLICE, SLICE_BACKWARD):
        return None
    result, argument = step.values[str(call.results[0])], step.values[call.args[0].value]
    a, b = result.fake, argument.fake
    same_place = a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    if call.target is SLICE:
        return argument if a.shape == b.shape and same_place else None
    step_of_slice = call.args[5]
    if a.shape != b.shape or step_of_slice != 1:
        return None
    if not same_place or a.untyped_storage().nbytes() != b.untyped_storage().nbytes():
        raise NotSymbolic("the gradient of a slice has other strides if the slice is a whole dimension")
    return argument
