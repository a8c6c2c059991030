"""Make Triton's kernels and users' ops that write into their arguments visible to a tracer as ops with new results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from rematplan.ir import ModelError
from rematplan.runtime.capture.patches.kernel_writes import python_function, written_parameters
from rematplan.runtime.graph.captured_step import Ref
from rematplan.runtime.graph.compat import (
    FunctionalTensor,
    OpOverload,
    TorchDispatchMode,
    from_functional_tensor,
    functionalize_sync,
    pytree,
    tritons_calls_wrapped,
)
from rematplan.runtime.graph.writing_calls import Launch, WritingCall, write
from rematplan.runtime.symbols.expressions import SYMBOLIC, NotSymbolic

PYTORCHS = frozenset(
    {"aten", "prim", "prims", "inductor", "c10d", "_c10d_functional", "profiler", "rematplan"}
)
"""Namespaces of ops that the tracer itself turns into ones without writes, or that a step cannot contain."""


@contextmanager
def written_tensors_recorded() -> Iterator[None]:
    """Record, inside the block and in this thread, launches of Triton's kernels and ops that write into arguments."""
    with ExitStack() as stack:
        stack.enter_context(_Ops())
        jit = sys.modules.get("triton.runtime.jit")  # without it, nothing launches a kernel
        if jit is not None:
            owner = jit.KernelInterface
            stack.enter_context(patch.object(owner, "__getitem__", _launching(owner.__getitem__)))
            # torch.library.wrap_triton would record an operator that takes functions.
            stack.enter_context(patch.object(*tritons_calls_wrapped, lambda: False))
        yield


class _Ops(TorchDispatchMode):
    """Records users' ops whose schema says that they write into arguments; `ModelError` for such an op that returns
    more than tensors."""

    supports_higher_order_operators = True  # they are not changed

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op; record a user's op that writes into arguments instead, or raise `ModelError` if it returns more
        than tensors. A copy into the gradient of an output is left out."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and _is_gradient_given(args[0]):
            return args[0]  # what a backward writes into a gradient that it gets, only this backward reads
        if not isinstance(func, OpOverload) or func.namespace in PYTORCHS or not func._schema.is_mutable:
            return func(*args, **kwargs)
        if any(str(one.type) != "Tensor" for one in func._schema.returns):
            raise ModelError(
                f"{func} writes into its arguments and returns more than tensors, so it cannot be planned"
            )
        names = [argument.name for argument in func._schema.arguments]
        changed = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        return _recorded(func, args, kwargs, names, changed)


def _is_gradient_given(tensor: Any) -> bool:
    """Return whether a tensor is, in the present trace, an input of the graph that is the gradient of an output."""
    mode = get_proxy_mode()
    if mode is None or isinstance(tensor, FunctionalTensor):
        return False
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return slot is not None and str(slot.proxy.node.target).startswith("tangents")


def _launching(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to replace ``own``, a kernel's ``__getitem__``, that records launches on traced tensors in this
    thread."""
    thread = get_ident()  # all threads see the replaced method

    def kernel_on_grid(kernel: Any, grid: Any) -> Any:
        launch = own(kernel, grid)

        def launched(*args: Any, **kwargs: Any) -> Any:
            traced = any(isinstance(leaf, FunctionalTensor) for leaf in pytree.tree_leaves((args, kwargs)))
            if get_ident() != thread or not traced:
                return launch(*args, **kwargs)
            function = python_function(kernel)
            name = getattr(function, "__name__", "kernel")
            names = list(kernel.arg_names)
            changed = names if function is None else written_parameters(function)
            at = grid
            if callable(grid) and kernel.fn is function:  # no autotuner, which passes more arguments
                defaults = {name: one.default for name, one in signature(function).parameters.items()}
                at = tuple(grid({**defaults, **dict(zip(names, args, strict=False)), **kwargs}))
            return _recorded(Launch(kernel, at, name), args, kwargs, names, changed)

        return launched

    return kernel_on_grid


def _recorded(
    function: Launch | OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    changed: Collection[str],
) -> Any:
    """Record a call, put the new contents into the tensors that it writes, and return what the function returns.
    ``names``: those of the parameters. ``changed``: those of the parameters into which the function may write."""
    tensors: list[torch.Tensor] = []
    written: set[int] = set()

    def placed(tensor: torch.Tensor, name: str) -> Ref:
        at = next((at for at, one in enumerate(tensors) if _same_memory(one, tensor)), len(tensors))
        tensors[at:] = tensors[at:] or [tensor]
        if name in changed:
            written.add(at)
        return Ref(str(at))

    def place(value: Any, name: str) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: placed(tensor, name), value)

    placed_args = tuple(place(value, name) for value, name in zip(args, names[: len(args)], strict=True))
    placed_kwargs = {name: place(value, name) for name, value in kwargs.items()}
    strides = tuple(tensor.stride() for tensor in tensors)
    writer = WritingCall(function, placed_args, placed_kwargs, tuple(sorted(written)), strides)
    _check(writer, tensors, (args, kwargs))
    with torch.no_grad():
        results = write(writer, tensors)
    returned, contents = results[: len(results) - len(written)], results[len(results) - len(written) :]
    for at, content in zip(writer.written, contents, strict=True):
        # As eager mode's kernels, the copy leaves the tensor's version as it is.
        tensors[at].data.copy_(content)
    if isinstance(function, Launch) or not returned:
        return None
    return returned[0] if len(function._schema.returns) == 1 else tuple(returned)


def _check(writer: WritingCall, tensors: Sequence[torch.Tensor], given: Any) -> None:
    """Raise an error for a call whose results are unknown. It is `NotSymbolic` for open sizes, and `ModelError` for
    tensors in objects and for writes into a constant or overlapping tensors."""
    others = [leaf for leaf in pytree.tree_leaves(given) if not isinstance(leaf, torch.Tensor)]
    for one in others:
        if any(isinstance(value, torch.Tensor) for value in getattr(one, "__dict__", {}).values()):
            raise ModelError(
                f"{writer.name} gets a tensor inside of a {type(one).__name__}, which a plan cannot contain"
            )
    sizes = [size for t in tensors for size in (*t.shape, *t.stride())]
    if any(isinstance(leaf, SYMBOLIC) for leaf in (*sizes, *others)):
        raise NotSymbolic(f"{writer.name} writes into tensors, and takes sizes as numbers")
    for at in writer.written:
        if not isinstance(tensors[at], FunctionalTensor):
            raise ModelError(f"{writer.name} writes into a tensor that is no input, parameter or buffer")
        if any(_overlap(tensors[at], other) for place, other in enumerate(tensors) if place != at):
            raise ModelError(f"{writer.name} writes into a tensor of which another argument is a part")


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tracer's tensor that holds the present content."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    functionalize_sync(tensor.elem)
    return from_functional_tensor(tensor.elem)


def _memory(tensor: torch.Tensor) -> tuple[int, Any, Any]:
    """Return a tensor's storage, and the range of bytes that it covers."""
    found = _content(tensor)
    length = 1 + sum((size - 1) * stride for size, stride in zip(found.shape, found.stride(), strict=True))
    start = found.storage_offset() * found.itemsize
    return found.untyped_storage()._cdata, start, start + length * found.itemsize * bool(found.numel())


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    layouts = [(_memory(t), t.shape, t.stride(), t.dtype) for t in (one, other)]
    return one is other or layouts[0] == layouts[1]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (storage, start, end), (others, first, last) = _memory(one), _memory(other)
    return storage == others and start < last and first < end
