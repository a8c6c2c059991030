"""Remove copies that a functional trace makes of what eager mode writes in place.

The trace turns ``a.copy_(b)`` into a new tensor with the layout of ``a``. If ``a`` is a slice, the tensor is copied
again, into a copy of the whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rematplan.runtime.capture.buffer_slices import PARTS
from rematplan.runtime.graph.captured_step import CapturedStep, Ref, StepOutput, substitute
from rematplan.runtime.graph.in_place_calls import fills

COPY = torch.ops.aten.copy.default


def with_plain_copies(step: CapturedStep) -> CapturedStep:
    """Return the step without copies that have their source's type, shape, strides and device, if both fill their
    storages. Calls read the source instead. If only the strides or the storage differ, only scatters read the
    source."""
    source, renamed, moved = dict[str, str](), dict[str, str](), dict[str, str]()
    calls = []
    for call in step.calls:
        args, kwargs = substitute((call.args, call.kwargs), lambda name: Ref(renamed.get(name, name)))
        if call.target in PARTS and isinstance(args[1], Ref):
            args = (args[0], Ref(source.get(args[1].value, args[1].value)), *args[2:])
        if call.target is COPY:
            (made,), (_, of) = call.made, (step.values[ref.value] for ref in args[:2])
            result = step.values[made]
            if result.fake.device == of.fake.device and fills(result.fake, of.fake):
                renamed[made], moved[result.storage] = of.name, moved.get(of.storage, of.storage)
                continue
            if _kind(result.fake) == _kind(of.fake):
                source[made] = of.name
        calls.append(replace(call, args=args, kwargs=kwargs))
    values = {name: replace(v, storage=moved.get(v.storage, v.storage)) for name, v in step.values.items()}
    outputs = tuple(StepOutput(o.kind, o.target, renamed.get(o.value, o.value)) for o in step.outputs)
    return replace(step, calls=tuple(calls), values=values, outputs=outputs)


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device
