"""Assignments of ``.data`` in a forward, which a tracer does not see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import FunctionalTensor

DATA: Any = torch.Tensor.data


@contextmanager
def written_data(given: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which what is assigned as the ``data`` of a tensor that a forward is given (a parameter, a buffer, an
    input) is written into it, so that it is among what the forward changes in place.

    Raises:
        ModelError: it is of another shape or type, or lies in the memory of such a tensor, which two would then share;
            or it is assigned to a tensor that the forward computes.
    """
    thread = get_ident()  # the attribute is everybody's
    places, memories = {id(t) for t in given}, {_lies(t)[0] for t in given}

    def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if get_ident() != thread or not (id(tensor) in places or isinstance(tensor, FunctionalTensor)):
            DATA.__set__(tensor, data)
        elif _lies(data) == _lies(tensor):
            return  # its own, as `Module.to` assigns it where there is nothing to do
        elif id(tensor) not in places:
            raise ModelError("the forward assigns the data of a tensor that it computes; compute another one")
        elif (data.shape, data.dtype) != (tensor.shape, tensor.dtype):
            raise ModelError(
                "the forward gives the data of a parameter, buffer or input another shape or type"
            )
        elif _lies(data)[0] in memories:
            raise ModelError("the forward assigns as data what is the memory of a parameter, buffer or input")
        else:
            with torch.no_grad():
                tensor.detach().copy_(data)

    with patch.object(torch.Tensor, "data", property(DATA.__get__, assign)):
        yield


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()
