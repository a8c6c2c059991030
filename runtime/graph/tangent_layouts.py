"""Adapting a backward to gradients of outputs whose strides differ from those at capture.

A copy to other strides could change the last bits, so the backward uses the strides that arrive and repeats eager
mode's choices by strides. It records all strides (`Notes`), so that it can be compiled for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value
from rematplan.runtime.graph.compat import FakeTensorMode
from rematplan.runtime.graph.in_place_calls import IN_PLACE
from rematplan.runtime.graph.storage_slices import has_strides

ATEN = torch.ops.aten
RESHAPE = ATEN.reshape.default
"""The op whose result may or may not share its argument's memory."""
LAID = "rematplan.laid.default"
"""The op by which a trace gives a result the strides that it has at capture."""
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
"""Ops for which autograd's formulas make the gradient contiguous first (derivatives.yaml). If it was contiguous
at capture, the trace does not show that. Some of these ops take strides as arguments, and would compute something
else for a gradient of other strides."""


def for_any_layout(step: CapturedStep) -> CapturedStep:
    """Return the step with a backward half that computes the bits of eager mode for output gradients of any strides."""
    late = step.after_loss
    copies = _copies_to_reshape(step)
    written = {call.name for call in step.calls if call.name in late and _has_layout_of_first(step, call)}

    def open_(call: Call) -> Call:
        """Return a call of the backward half as it must be for gradients of any strides; other calls as they are."""
        if call.name not in late:
            return call
        # A reshape of a formula was captured as a view or a copy, by the strides of a gradient: it becomes a
        # reshape again.
        if call.name in copies:
            return replace(call, target=RESHAPE, args=(call.args[0], copies[call.name]), kwargs={})
        if call.target in VIEWS:
            return replace(call, target=RESHAPE)
        if call.name in written:
            return replace(call, target=LikeFirst(call.target, ()))
        if str(call.target) == LAID and step.values[call.args[0].value].call in written:
            return replace(call, target=ATEN.clone.default, args=call.args[:1])
        # Some formulas and users' functions make a gradient contiguous first, which a trace of a contiguous
        # one does not show.
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
    """An op whose positional tensor arguments are first copied to the strides that they had at capture, if their
    strides differ."""

    op: Callable[..., Any]
    """The op."""
    strides: tuple[Any, ...]
    """For each positional argument, its strides at capture: None if it is no tensor, a list for a list of tensors."""

    def __str__(self) -> str:
        return f"{self.op}.as_captured"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the arguments whose strides differ from those at capture, call the op, and return its result."""
        return self.op(*map(_laid_out, args, self.strides), **kwargs)


class LikeFirst(AsCaptured):
    """An op whose result has the strides of its first argument, into which eager mode writes it."""

    def __str__(self) -> str:
        return f"{self.op}.like_first"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op and return its result, copied if its strides differ from those of the first argument."""
        return _laid_out(self.op(*args, **kwargs), args[0].stride())


def _has_layout_of_first(step: CapturedStep, call: Call) -> bool:
    """Return whether eager mode writes a call's first result into the call's first argument, and this argument is a
    dense tensor of the result's shape. False for views, `LAID` and ops in `IN_PLACE`."""
    if not call.written or call.target in IN_PLACE or call.is_view or str(call.target) == LAID:
        return False
    first, made = call.args[0], step.values.get(call.results[0] or "")
    if made is None or not isinstance(first, Ref):
        return False
    like = step.values[first.value].fake
    dense = torch.empty_like(like).stride() == like.stride()
    return made.fake.shape == like.shape and dense


def _laid_out(arg: Any, strides: Any) -> Any:
    if isinstance(strides, list):
        return type(arg)(map(_laid_out, arg, strides))
    if strides is None or has_strides(arg, strides):  # no formula copies because of a dimension of size 1
        return arg
    return torch.empty_strided(arg.shape, strides, dtype=arg.dtype, device=arg.device).copy_(arg)


def _copies_to_reshape(step: CapturedStep) -> dict[str, Any]:
    """Return, for each clone as which a reshape was captured, by name, the shape of the `_unsafe_view` that alone reads
    the clone. Clones that the step returns are left out."""
    outputs, found = step.returned(), {}
    for call in step.calls:
        if call.target is ATEN.clone.default and step.values[call.results[0] or ""].storage not in outputs:
            by = step.readers.get(call.results[0] or "", ())
            if len(by) == 1 and by[0].target is ATEN._unsafe_view.default:
                found[call.name] = by[0].args[1]
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: int
    """Bytes of the storage."""


@dataclass
class Notes:
    """The layouts (shape, strides, offset, storage size) of a step's values, by name, as a backward records them."""

    layouts: dict[str, _Layout] = field(default_factory=dict)

    def note(self, value: str, tensor: torch.Tensor | None) -> None:
        """Record the layout of a value's tensor; nothing if the tensor is None."""
        if tensor is None:
            return
        self.layouts[value] = _Layout(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.untyped_storage().nbytes(),
        )

    def with_layouts(self, step: CapturedStep) -> CapturedStep:
        """Return the step in which each recorded value has the recorded shape, strides, offset and storage size; other
        values are unchanged."""
        with FakeTensorMode():
            noted = {name: _fake(step.values[name], layout) for name, layout in self.layouts.items()}
        return replace(step, values={**step.values, **noted})


def _fake(value: Value, layout: _Layout) -> Value:
    like = value.fake
    storage = torch.empty(layout.storage // like.element_size(), dtype=like.dtype, device=like.device)
    return replace(value, fake=storage.as_strided(layout.shape, layout.strides, layout.offset))
