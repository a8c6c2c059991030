"""Keep, while a forward is traced, the strides of tensors that it changes in place or draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx.traceback import annotate, get_current_meta
from torch.types import Number
from torch.utils.weak import WeakTensorKeyDictionary

from rematplan.ir import ModelError
from rematplan.runtime.capture.patches.fake_layouts import ATEN, aten_op, is_view, makes_new_memory, real_like
from rematplan.runtime.graph.compat import (
    FunctionalTensor,
    OpOverload,
    TorchDispatchMode,
    TorchDispatchModeKey,
    current_autograd_node,
    from_functional_tensor,
    functionalize_commit_update,
    functionalize_replace,
    functionalize_sync,
    get_dispatch_mode,
    pytree,
)
from rematplan.runtime.graph.storage_slices import is_dense, is_plain

RUN, GRAIN = 64, 2**15
"""A CPU kernel processes a contiguous row in vectors of at most ``RUN`` numbers, and the rest of the row one by one, by
other code. One thread processes a tensor of fewer than ``GRAIN`` numbers."""


def mark(name: str, tag: str) -> str:
    """Return the key of a mark (`WRITTEN`, `IN_PIECE`) that counts only for nodes with this `TAG`: PyTorch copies the
    marks of a forward's node to the nodes of its backward, for which they are wrong."""
    return f"{name}.{tag}"


@torch.library.custom_op("rematplan::laid", mutates_args=())
def _laid(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a copy of ``x`` whose strides are ``stride``."""
    return x.new_empty_strided(x.shape, stride).copy_(x)


_laid.register_fake(lambda x, stride: x.new_empty_strided(x.shape, stride))


DRAWS = frozenset(
    {
        *(ATEN.bernoulli_.float, ATEN.bernoulli_.Tensor, ATEN.cauchy_.default, ATEN.exponential_.default),
        *(ATEN.geometric_.default, ATEN.log_normal_.default, ATEN.normal_.default, ATEN.uniform_.default),
        *(ATEN.random_.default, getattr(ATEN.random_, "from"), ATEN.random_.to),
    }
)
"""Ops that overwrite a tensor with random numbers."""
PIECES = frozenset({ATEN.unsafe_split.Tensor, ATEN.unsafe_split_with_sizes.default})
"""Ops that return views as if they were new tensors: a write into one leaves the others and the whole as they are."""
IN_PIECE, WRITTEN = "rematplan.in_piece", "rematplan.written"
TAG, FORWARD = "partitioner_tag", "is_forward"
"""The key under which a node's metadata say whether the node is of the forward or of the backward, and the value for
the forward. While the forward is traced, there is no value."""
UNNAMEABLE = getattr(ATEN.random_, "from")
"""An op whose overload name is a Python keyword, so that a tracer cannot write a call of it as Python source."""


@torch.library.custom_op("rematplan::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drawn(
    like: torch.Tensor, op: str, numbers: Sequence[Number], tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return a tensor like ``like`` with random numbers of the in-place ATen op ``op``, such as ``normal_.default``."""
    drawn: torch.Tensor = aten_op(op)(real_like(like), *tensors, *numbers)
    return drawn


_drawn.register_fake(lambda like, op, numbers, tensors: real_like(like))


OTHERWISE_IN_PLACE: Mapping[str, OpOverload] = {
    **{f"{one}Backward0": ATEN.masked_fill.Scalar for one in ("Maximum", "Minimum", "Fmax", "Fmin", "Clamp")},
    "MaskedSelectBackward0": ATEN.masked_scatter.default,
    **dict.fromkeys(
        ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), ATEN.mul.Tensor
    ),
}
"""By the class of an autograd node, the op that its formula calls for a tracer's tensors; otherwise it writes into a
tensor: the op's first argument, and with `mul`, on CPUs, a contiguous one."""


class InPlaceLayouts(TorchDispatchMode):
    """Makes a trace keep, inside the block, the strides of tensors that are changed in place or drawn, as eager mode
    does. Raises `ModelError` if the forward writes into a constant, or into windows (``unfold``) that overlap or leave
    gaps."""

    supports_higher_order_operators = True  # they are not changed

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.windows: Any = WeakTensorKeyDictionary()  # overlapping or incomplete windows, and their views
        self.pieces: Any = WeakTensorKeyDictionary()  # results of `PIECES`

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op with eager mode's strides for what it writes in place, and mark its node as `WRITTEN`. Draws that
        would lose strides are replaced. `ModelError` if a constant is written, or windows (``unfold``)."""
        del types
        written = args[0] if args and _writes_first(func) else None
        if _is_constant(written):
            raise ModelError(
                "the forward changes a tensor in place that is no input, parameter or buffer; make it a buffer"
            )
        if isinstance(written, FunctionalTensor):
            if written in self.windows:
                raise ModelError(
                    "the forward writes into windows of a tensor (unfold), which a plan cannot contain"
                )
            if func in DRAWS and not kwargs and (func is UNNAMEABLE or not is_plain(written)):
                return _draw(func, written, args[1:])
        tag = get_current_meta().get(TAG) or FORWARD
        marks = {mark(WRITTEN, tag): True} if isinstance(written, FunctionalTensor) else {}
        if marks and written in self.pieces:
            marks[mark(IN_PIECE, tag)] = True
        with annotate(marks) if marks else nullcontext():
            if isinstance(written, FunctionalTensor) and written.device.type == "cpu":
                _restore_strides(written, changed=False)
            result = func(*args, **(kwargs or {}))
            if isinstance(written, FunctionalTensor):
                _restore_strides(written, changed=True)
        if OTHERWISE_IN_PLACE.get(type(current_autograd_node()).__name__) is func:
            result = _as_if_in_place(func, args[0], result)
        if func in PIECES:
            self.pieces.update(dict.fromkeys(result, True))
        if makes_new_memory(func):
            result = pytree.tree_map_only(torch.Tensor, _writable, result)
        if _leaves_out(func, args) or (args and is_view(func) and args[0] in self.windows):
            for view in pytree.tree_leaves(result):
                self.windows[view] = True
        return result


def _is_constant(tensor: Any) -> bool:
    """Return whether a tracer records a tensor as a constant, as one in a plain attribute of a module."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FunctionalTensor):
        return False
    return get_dispatch_mode(TorchDispatchModeKey.FUNCTIONAL) is not None


def _writable(made: torch.Tensor) -> torch.Tensor:
    """Return an op's result in a form that the forward may write to: a tracer refuses writes into constants."""
    return FunctionalTensor.to_functional(made) if _is_constant(made) else made


def _leaves_out(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call is an ``unfold`` whose windows overlap or leave elements out."""
    if func is not ATEN.unfold.default:
        return False
    x, dim, size, step = args
    # A tracer takes what is written into the windows for the content of the whole tensor.
    return bool(size != step or x.dim() == 0 or x.shape[dim] % size)


def _draw(func: OpOverload, written: FunctionalTensor, args: Sequence[Any]) -> FunctionalTensor:
    """Overwrite a traced tensor with random numbers, in its strides, by the in-place op ``func``, and return it."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    numbers = [a for a in args if not isinstance(a, torch.Tensor)]
    name = f"{func._opname}.{func._overloadname}"
    drawn = torch.ops.rematplan.drawn.default(written, name, numbers, tensors)
    functionalize_replace(written.elem, from_functional_tensor(drawn.elem))
    functionalize_commit_update(written.elem)
    functionalize_sync(written.elem)
    return written


def _as_if_in_place(func: Any, first: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return a result in the strides that it has where a formula writes into a tensor (`OTHERWISE_IN_PLACE`)."""
    of_new = func is ATEN.mul.Tensor
    if of_new and result.device.type != "cpu":
        return result
    like = torch.empty_like(result, memory_format=torch.contiguous_format) if of_new else first
    if like.shape != result.shape or like.stride() == result.stride() or not is_dense(like):
        return result
    laid: torch.Tensor = torch.ops.rematplan.laid.default(result, like.stride())
    return laid


def _restore_strides(written: FunctionalTensor, *, changed: bool) -> None:
    """Give a tensor that is changed in place eager mode's strides, if last bits may depend on them. ``changed``:
    whether the change has happened, so that any op may read it next."""
    functionalize_sync(written.elem)
    now = from_functional_tensor(written.elem)
    # The tracer may have replaced the content by a new tensor of other strides, as `masked_fill` gives.
    if now.stride() != written.stride() and (is_dense(written) if changed else not _in_whole_runs(written)):
        laid = torch.ops.rematplan.laid.default(written, written.stride())
        functionalize_replace(written.elem, from_functional_tensor(laid.elem))
        if changed:
            functionalize_commit_update(written.elem)
            functionalize_sync(written.elem)


def _writes_first(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.is_mutable and func._opname.endswith("_")


def _in_whole_runs(tensor: torch.Tensor) -> bool:
    """Return whether elementwise kernels have the same results for a tensor and a dense copy of it."""
    # Kernels process the rest of a row after whole runs by other code, and a large tensor by several threads.
    run = tensor.shape[-1] if tensor.ndim and tensor.stride(-1) == 1 else 1
    return run % RUN == 0 and tensor.numel() < GRAIN
