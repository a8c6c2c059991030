"""Assignments of ``.data`` in a forward, which a tracer does not see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from rematplan.ir import ModelError

DATA: Any = torch.Tensor.data


@contextmanager
def written_data(given: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which what is assigned as the ``data`` of a tensor that a forward is given (a parameter, a buffer, an
    input) is written into it, so that it is among what the forward changes in place.

    Raises:
        ModelError: it is of another shape or type.
    """
    thread, places = get_ident(), {id(t) for t in given}  # the attribute is everybody's

    def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if get_ident() != thread or id(tensor) not in places:
            DATA.__set__(tensor, data)
        elif (data.shape, data.dtype) != (tensor.shape, tensor.dtype):
            raise ModelError(
                "the forward assigns the data of a tensor that it is given another shape or type"
            )
        elif _memory(data) != _memory(tensor):
            with torch.no_grad():
                tensor.detach().copy_(data)

    torch.Tensor.data = property(DATA.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data  # it is inherited


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
