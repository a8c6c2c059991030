"""The gradient of a cross entropy, computed in one tensor of its scores' size.

Of ``nll_loss`` and ``log_softmax`` each has a backward that gives such a tensor, and the second only reads the first's
to make its own of it. A language model's scores are often the largest tensors of its step: here it holds one fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, refs
from rematplan.runtime.graph.kernel_of import kernel_of

ATEN = torch.ops.aten
LOSSES = frozenset({ATEN.nll_loss_backward.default, ATEN.nll_loss2d_backward.default})
SCORES = ATEN._log_softmax_backward_data
COMPARED = frozenset({"cpu"})
"""Types of devices whose kernels were seen to give the same bits in place."""


@dataclass(frozen=True)
class CrossEntropyBackward:
    """The backward of ``nll_loss`` and then that of ``log_softmax``, which writes over what the first gives: it reads
    each row whole before it writes there, so that the bits are those of two tensors.

    Its arguments are those of the first op, and those of the second but for the gradient.
    """

    loss: Callable[..., Any]
    source_name = "cross_entropy_backward"

    def __str__(self) -> str:
        return f"{self.loss}.in_place"

    def __call__(self, *args: Any) -> torch.Tensor:
        """What the second op gives."""
        *own, output, dim, dtype = args
        gradient: torch.Tensor = kernel_of(self.loss)(*own)
        kernel_of(SCORES.out)(gradient, output, dim, dtype, out=gradient)
        return gradient


def with_losses_in_place(step: CapturedStep) -> CapturedStep:
    """The step with one call for the backward of each cross entropy, under the name of the first of its two."""
    readers: dict[str, list[Call]] = {}
    for call in step.calls:
        for ref in dict.fromkeys(refs((call.args, call.kwargs))):
            readers.setdefault(ref.value, []).append(call)
    outputs = {o.value for o in step.outputs}
    calls, values, gone = [], dict(step.values), set[str]()
    for call in step.calls:
        second = _second(step, call, readers) if outputs.isdisjoint(r for r in call.results if r) else None
        if second is not None:
            gone.add(second.name)
            target = CrossEntropyBackward(call.target)
            call = replace(call, target=target, args=(*call.args, *second.args[1:]), results=second.results)
            result = str(second.results[0])
            values[result] = replace(values[result], call=call.name)
        if call.name not in gone:
            calls.append(call)
    return replace(step, calls=tuple(calls), values=values)


def _second(step: CapturedStep, call: Call, readers: dict[str, list[Call]]) -> Call | None:
    """What alone reads the gradient that a loss's backward gives, and may write over it."""
    if call.target not in LOSSES or call.kwargs:
        return None
    given = str(call.results[0])
    second = readers.get(given, [])
    if len(second) != 1 or second[0].target is not SCORES.default or second[0].kwargs:
        return None
    made, result = (step.values[v].fake for v in (given, str(second[0].results[0])))
    alike = made.dtype == result.dtype and made.is_contiguous() and result.is_contiguous()
    alike &= made.device.type in COMPARED
    return second[0] if alike and second[0].args[0] == Ref(given) else None
