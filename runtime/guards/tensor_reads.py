"""What a forward reads of a tensor without making a call: its numbers as a list, or as an array of NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import numpy as np
import torch

from rematplan.runtime.graph.compat import (
    DataDependentOutputException,
    DisableAutocast,
    any_mode,
    disable_current_modes,
)

TO_LIST, _TO_NUMPY = torch.Tensor.tolist, torch.Tensor.numpy


@contextmanager
def asked(answer: Callable[[Callable[..., Any], torch.Tensor], Any]) -> Iterator[None]:
    """A block in which ``answer`` says what `tolist` and `numpy` give, which make no call that a mode could see.

    Both read the memory of a tensor that is no traced one; of others `numpy` refuses all, or reads what lies there.
    """
    thread = get_ident()  # the methods are everybody's

    def to_list(tensor: torch.Tensor) -> Any:
        return answer(TO_LIST, tensor) if get_ident() == thread else TO_LIST(tensor)

    def to_numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        if get_ident() != thread:
            return _TO_NUMPY(tensor, force=force)
        kind, shape, content = answer(_numpy, tensor)
        return np.frombuffer(bytearray(content), kind).reshape(shape)

    torch.Tensor.tolist, torch.Tensor.numpy = to_list, to_numpy  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.tolist, torch.Tensor.numpy  # they are inherited


def _numpy(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    array = _TO_NUMPY(tensor, force=True)
    return array.dtype.str, array.shape, array.tobytes()


@contextmanager
def undecided() -> Iterator[None]:
    """A block that may not decide by values.

    Raises:
        DataDependentOutputException: it looks at what a tensor holds.
    """

    def refuse(read: Any, _: torch.Tensor) -> Any:
        raise DataDependentOutputException(read)

    with asked(refuse):
        yield


@contextmanager
def plainly() -> Iterator[None]:
    """A block in which calls are made on real tensors as they are."""
    with disable_current_modes() if any_mode() else nullcontext(), torch.no_grad(), DisableAutocast():
        yield
