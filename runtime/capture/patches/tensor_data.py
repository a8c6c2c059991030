"""Make assignments to ``.data`` in a forward visible to a tracer, and refuse uses of ``.grad``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import FunctionalTensor

DATA: Any = torch.Tensor.data
GRAD: Any = torch.Tensor.grad


@contextmanager
def written_data(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Turn assignments to ``.data`` of parameters, buffers and inputs (``tensors``) into in-place writes, inside the
    block and in this thread. Raises `ModelError` for data of another shape or type or in another such tensor's memory.
    Raises it, too, for data of a computed tensor, and for uses of the ``.grad`` of one that requires a gradient."""
    thread = get_ident()  # all threads see the replaced attribute
    places, memories = {id(t) for t in tensors}, {_location(t)[0] for t in tensors}

    def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Copy ``data`` into a parameter, buffer or input; other untraced tensors, and other threads, get it as data.
        `ModelError` for a computed tensor, another shape or type, or memory of another such tensor."""
        if get_ident() != thread or not (id(tensor) in places or isinstance(tensor, FunctionalTensor)):
            DATA.__set__(tensor, data)
        elif _location(data) == _location(tensor):
            return  # its present data, as `Module.to` assigns it if nothing changes
        elif id(tensor) not in places:
            raise ModelError(
                "the forward assigns the data of a tensor that it computes; compute a new tensor instead"
            )
        elif (data.shape, data.dtype) != (tensor.shape, tensor.dtype):
            raise ModelError(
                "the forward assigns the data of a parameter, buffer or input a tensor of another shape or type"
            )
        elif _location(data)[0] in memories:
            raise ModelError("the forward assigns as data the memory of another parameter, buffer or input")
        else:
            with torch.no_grad():
                tensor.detach().copy_(data)

    def refuse() -> None:
        raise ModelError(
            "the forward, or its backward, uses the gradient (.grad) of a parameter or input, which a plan does not "
            "know; use it outside of them"
        )

    def gradient(tensor: torch.Tensor) -> Any:
        if get_ident() != thread or id(tensor) not in places or not tensor.requires_grad:
            return GRAD.__get__(tensor)
        if sys._getframe(1).f_code.co_qualname != "Module._apply":  # `to` looks for one to convert
            refuse()
        return None

    def set_gradient(tensor: torch.Tensor, value: Any) -> None:
        if get_ident() == thread and id(tensor) in places:
            refuse()
        GRAD.__set__(tensor, value)

    with (
        patch.object(torch.Tensor, "data", property(DATA.__get__, assign)),
        patch.object(torch.Tensor, "grad", property(gradient, set_gradient, GRAD.__delete__)),
    ):
        yield


def _location(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()
