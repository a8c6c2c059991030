"""Compute the gradient of a cross entropy in one tensor of the size of the scores, which are often a step's largest
tensors.

In eager mode the backwards of ``nll_loss`` and ``log_softmax`` each return one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.graph.kernel_of import kernel_of

ATEN = torch.ops.aten
LOSSES = frozenset({ATEN.nll_loss_backward.default, ATEN.nll_loss2d_backward.default})
SCORES = ATEN._log_softmax_backward_data
COMPARED = frozenset({"cpu"})
"""Device types whose kernels were found to give the same bits in place."""


@dataclass(frozen=True)
class CrossEntropyBackward:
    """The backwards of ``nll_loss`` and ``log_softmax`` as one op with a single tensor, which the second overwrites."""

    loss: Callable[..., Any]
    """The first op, whose arguments come first, then the second's without the gradient."""
    source_name = "cross_entropy_backward"

    def __str__(self) -> str:
        return f"{self.loss}.in_place"

    def __call__(self, *args: Any) -> torch.Tensor:
        """Return the gradient of the scores from ``nll_loss_backward``'s arguments, the result of ``log_softmax``,
        its dimension and type."""
        *own, output, dim, dtype = args
        gradient: torch.Tensor = kernel_of(self.loss)(*own)
        # Each row is read before it is written, so the bits are the same.
        kernel_of(SCORES.out)(gradient, output, dim, dtype, out=gradient)
        return gradient


def with_losses_in_place(step: CapturedStep) -> CapturedStep:
    """Return the step with one `CrossEntropyBackward`, named as the first call, for each pair of a backward of
    ``nll_loss`` and the only call that reads its result (`_second`). Pairs whose first call makes an output stay."""
    outputs = {o.value for o in step.outputs}
    calls, values, gone = [], dict(step.values), set[str]()
    for call in step.calls:
        second = _second(step, call) if outputs.isdisjoint(call.made) else None
        if second is not None:
            gone.add(second.name)
            target = CrossEntropyBackward(call.target)
            call = replace(call, target=target, args=(*call.args, *second.args[1:]), results=second.results)
            result = str(second.results[0])
            values[result] = replace(values[result], call=call.name)
        if call.name not in gone:
            calls.append(call)
    return replace(step, calls=tuple(calls), values=values)


def _second(step: CapturedStep, call: Call) -> Call | None:
    """Return the backward of ``log_softmax`` that may overwrite the gradient of ``call``, a backward of ``nll_loss`` on
    a CPU; else None. It is the only reader, and both gradients are contiguous and of one type."""
    if call.target not in LOSSES or call.kwargs:
        return None
    name = str(call.results[0])
    second = step.readers.get(name, ())
    if len(second) != 1 or second[0].target is not SCORES.default or second[0].kwargs:
        return None
    made, result = (step.values[v].fake for v in (name, str(second[0].results[0])))
    alike = (made.dtype, made.stride()) == (result.dtype, result.stride()) and made.is_contiguous()
    alike &= made.device.type in COMPARED
    return second[0] if alike and second[0].args[0] == Ref(name) else None
