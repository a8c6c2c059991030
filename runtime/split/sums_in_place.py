"""Sums of gradients of weights, in the memory of their first summand.

Without it, a sum over parts, its next summand and the result exist together. A product is added to the sum by one call.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, refs
from rematplan.runtime.graph.in_place_calls import COMMUTES, IN_PLACE, fills
from rematplan.runtime.split.regions import StepUse

ATEN = torch.ops.aten
NEW = frozenset(
    {
        *IN_PLACE,
        ATEN.mm.default,
        ATEN.bmm.default,
        ATEN.embedding_dense_backward.default,
        ATEN._to_copy.default,
    }
)
"""Ops that make the first summand of a weight's gradient; their only result never shares memory with an argument."""


def with_sums_in_place(step: CapturedStep) -> CapturedStep:
    """Return the step in which sums and products are computed in an argument's memory, if gradients of weights alone
    depend on them, and nothing else reads the argument. The result must have the argument's type, shape and strides, so
    that the bits are the same."""
    use, calls, moved = StepUse(step), list[Call](), dict[str, str]()
    for call in step.calls:
        if (at := _place(use, call)) is not None:
            first, *others = (call.args[at], *call.args[:at], *call.args[at + 1 :])
            call = replace(call, args=(first, *others), in_place=True)
            old = step.values[first.value].storage
            moved[step.values[call.results[0] or ""].storage] = moved.get(old, old)
        calls.append(call)
    values = {name: replace(v, storage=moved.get(v.storage, v.storage)) for name, v in step.values.items()}
    return replace(step, calls=tuple(calls), values=values)


def _place(use: StepUse, call: Call) -> int | None:
    """Return the position of the argument in whose memory a call's result can be; None if there is none."""
    if call.target not in IN_PLACE or call.kwargs or call.results[0] not in use.of_weights:
        return None
    return next(
        (at for at in range(1 + (call.target in COMMUTES)) if _is_free(use, call, call.args[at])), None
    )


def _is_free(use: StepUse, call: Call, argument: object) -> bool:
    """Return whether a result fits into an argument's memory, which an op has allocated for this call alone."""
    if not isinstance(argument, Ref) or (maker := use.maker.get(argument.value)) is None:
        return False
    value, result = use.step.values[argument.value], use.step.values[call.results[0] or ""].fake
    read = [r.value for r in refs(call.args)]
    return (
        maker.target in NEW
        and use.readers[argument.value] == [call]
        and read.count(argument.value) == 1
        and value.storage not in use.outputs
        and fills(result, value.fake)
        # Strides of dimensions of size 1 are arbitrary.
        and 1 not in result.shape
        and not result.is_complex()
    )
