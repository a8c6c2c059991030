"""Compute the gradient of a cross entropy in a single tensor of the size of the scores.

The backward of ``nll_loss`` returns a tensor of this size. Only the backward of ``log_softmax`` reads it, and returns a
second one. A language model's scores are often the largest tensors of its step, so one of them less saves much memory.
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
"""Device types whose kernels were found to give the same bits in place."""


@dataclass(frozen=True)
class CrossEntropyBackward:
    """The backward of ``nll_loss`` followed by the backward of ``log_softmax``, as one op that needs a single tensor.

    The second overwrites the result of the first. It reads each row before it writes the row, so the bits are the same
    as with two tensors.

    Its arguments are those of the first op, followed by those of the second op without the gradient. ``loss``: the
    first op.
    """

    loss: Callable[..., Any]
    source_name = "cross_entropy_backward"

    def __str__(self) -> str:
        return f"{self.loss}.in_place"

    def __call__(self, *args: Any) -> torch.Tensor:
        """Return the gradient with respect to the scores (the input of ``log_softmax``).

        ``args``: the arguments of ``nll_loss_backward``, followed by the result of ``log_softmax``, its dimension and
        its input's type.
        """
        *own, output, dim, dtype = args
        gradient: torch.Tensor = kernel_of(self.loss)(*own)
        kernel_of(SCORES.out)(gradient, output, dim, dtype, out=gradient)
        return gradient


def with_losses_in_place(step: CapturedStep) -> CapturedStep:
    """Return the step with one `CrossEntropyBackward` in place of each backward of ``nll_loss`` that is followed by a
    backward of ``log_softmax``. It has the name of the first call.

    A pair is replaced only if it runs on a CPU, both gradients are contiguous and of the same type, and nothing but the
    second call reads the first call's result.
    """
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
    """Return the backward of ``log_softmax`` that reads the gradient which ``call`` returns, if it may overwrite this
    gradient; otherwise None.

    It may if ``call`` is a backward of ``nll_loss`` on a CPU, nothing else reads the gradient, and both gradients are
    contiguous and of the same type.

    ``readers``: the calls that read a value, by the value's name.
    """
    if call.target not in LOSSES or call.kwargs:
        return None
    name = str(call.results[0])
    second = readers.get(name, [])
    if len(second) != 1 or second[0].target is not SCORES.default or second[0].kwargs:
        return None
    made, result = (step.values[v].fake for v in (name, str(second[0].results[0])))
    alike = (made.dtype, made.stride()) == (result.dtype, result.stride()) and made.is_contiguous()
    alike &= made.device.type in COMPARED
    return second[0] if alike and second[0].args[0] == Ref(name) else None
