"""The gradients of a step's outputs as a loss gives them, laid out otherwise than when the step was captured.

A kernel may add up in the order in which numbers stand in memory, so that a gradient that is laid out anew gives other
last bits than eager mode. A backward therefore takes them as they come, and repeats the choices that eager mode makes
by the layout: to view a gradient or to copy it. How all else comes to lie is noted in the first backward of a layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value, refs
from rematplan.runtime.graph.compat import FakeTensorMode
from rematplan.runtime.graph.storage_slices import lies_so

ATEN = torch.ops.aten
RESHAPE = ATEN.reshape.default
VIEWS = frozenset({ATEN.view.default, ATEN._unsafe_view.default})

_NAMES = (
    "_reshape_alias",
    "as_strided",
    "as_strided_scatter",
    "native_group_norm_backward",
    "_weight_norm_interface_backward",
    "_cdist_backward",
    "view_as_complex",
    "view_as_real",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm_backward",
)
CONTIGUOUS = frozenset(getattr(ATEN, name).default for name in _NAMES)
"""Calls whose gradients formulas of autograd make contiguous (derivatives.yaml), which is no call where they are so.
Those that are given strides would else mean other numbers."""


def for_any_layout(step: CapturedStep) -> CapturedStep:
    """The step with `aten::reshape`, which formulas of gradients call, wherever the layout of a gradient decided at
    capture whether that is a view or a copy. What it then copies beyond the plan goes with what it copies.

    Formulas, or backwards that somebody has written, may have asked for contiguous gradients, which nothing shows where
    they were so: calls of which that is known, or that are not PyTorch's, get them as captured.
    """
    late = step.after_turn
    copies = _copies_to_reshape(step)

    def open_(call: Call) -> Call:
        if call.name not in late:
            return call
        if call.name in copies:
            return replace(call, target=RESHAPE, args=(call.args[0], copies[call.name]), kwargs={})
        if call.target in VIEWS:
            return replace(call, target=RESHAPE)
        own = getattr(call.target, "namespace", "aten") == "aten"
        return call if own and call.target not in CONTIGUOUS else _as_captured(step, call)

    return replace(step, calls=tuple(map(open_, step.calls)))


def _as_captured(step: CapturedStep, call: Call) -> Call:
    def strides(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [strides(a) for a in arg]
        return step.values[arg.value].fake.stride() if isinstance(arg, Ref) else None

    return replace(call, target=AsCaptured(call.target, tuple(map(strides, call.args))))


@dataclass(frozen=True, eq=False)
class AsCaptured:
    """An op that gets the arguments for which strides are stated, one a position, laid out so."""

    op: Callable[..., Any]
    strides: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.op}.as_captured"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the op gives."""
        return self.op(*map(_lie, args, self.strides), **kwargs)


def _lie(arg: Any, strides: Any) -> Any:
    if isinstance(strides, list):
        return type(arg)(map(_lie, arg, strides))
    if strides is None or lies_so(arg, strides):  # no formula copies for the sake of a dimension of 1
        return arg
    return torch.empty_strided(arg.shape, strides, dtype=arg.dtype, device=arg.device).copy_(arg)


def _copies_to_reshape(step: CapturedStep) -> dict[str, Any]:
    """The calls that only copy what could not be reshaped otherwise, and the shapes."""
    outputs = {step.values[o.value].storage for o in step.outputs}
    readers: dict[str, list[Call]] = defaultdict(list)
    for call in step.calls:
        for ref in refs((call.args, call.kwargs)):
            readers[ref.value].append(call)
    found = {}
    for call in step.calls:
        if call.target is ATEN.clone.default and step.values[call.results[0] or ""].storage not in outputs:
            by = readers[call.results[0] or ""]
            if len(by) == 1 and by[0].target is ATEN._unsafe_view.default:
                found[call.name] = by[0].args[1]
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: int
    """Bytes."""


@dataclass
class Notes:
    """How the values of a step lay when they were made."""

    layouts: dict[str, _Layout] = field(default_factory=dict)

    def note(self, value: str, tensor: torch.Tensor | None) -> None:
        """A value is made, or None for a gradient that nobody wants."""
        if tensor is None:
            return
        self.layouts[value] = _Layout(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.untyped_storage().nbytes(),
        )

    def lying(self, step: CapturedStep) -> CapturedStep:
        """The step with fakes that lie as noted."""
        with FakeTensorMode():
            noted = {name: _fake(step.values[name], layout) for name, layout in self.layouts.items()}
        return replace(step, values={**step.values, **noted})


def _fake(value: Value, layout: _Layout) -> Value:
    like = value.fake
    storage = torch.empty(layout.storage // like.element_size(), dtype=like.dtype, device=like.device)
    return replace(value, fake=storage.as_strided(layout.shape, layout.strides, layout.offset))
