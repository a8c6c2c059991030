"""Interception of `Tensor.tolist`, `numpy`, `item` and texts, by which a forward reads a tensor's values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from rematplan.runtime.graph.compat import (
    DataDependentOutputException,
    DisableAutocast,
    FunctionalTensor,
    any_mode,
    disable_current_modes,
)
from rematplan.runtime.guards.text_uses import TEXT, leaves

TO_LIST, _TO_NUMPY, ITEM = torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item
_FORMAT, _REPR = torch.Tensor.__format__, FunctionalTensor.__repr__


@contextmanager
def asked(answer: Callable[..., Any], number: Callable[[torch.Tensor], Any] | None = None) -> Iterator[None]:
    """Inside the block, let `Tensor.tolist`, `Tensor.numpy` and texts of traced tensors return ``answer(read, tensor,
    …)``, and `Tensor.item` ``number(tensor)``, if given. Other threads, and calls outside of all dispatch modes, are
    not affected. A text that is only written for people is `TEXT`; another text of a tensor that requires a gradient
    raises DataDependentOutputException."""
    thread = get_ident()

    def plainly() -> bool:
        # All threads see the replaced methods. Without a mode, the tracer has been asked to look away.
        return get_ident() != thread or not any_mode()

    def to_list(tensor: torch.Tensor) -> Any:
        return TO_LIST(tensor) if plainly() else answer(TO_LIST, tensor)

    def to_numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        if plainly():
            return _TO_NUMPY(tensor, force=force)
        kind, shape, content = answer(_numpy, tensor)
        return np.frombuffer(bytearray(content), kind).reshape(shape)

    def to_number(tensor: torch.Tensor) -> Any:
        return ITEM(tensor) if plainly() or number is None else number(tensor)

    def text(tensor: torch.Tensor, *form: str) -> str:
        """Return a tensor's text: `TEXT` for a traced one that is only written for people, else ``answer``.
        DataDependentOutputException for another text of one that requires a gradient."""
        if plainly() or not isinstance(tensor, FunctionalTensor):
            return _FORMAT(tensor, *form) if form else _REPR(tensor)  # type: ignore[arg-type]
        if leaves(sys._getframe(1)):
            return TEXT
        if tensor.requires_grad:  # which is a part of the text
            raise DataDependentOutputException("text")  # type: ignore[arg-type]
        found: str = answer(_text, tensor, *form)
        return found

    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item = to_list, to_numpy, to_number  # type: ignore
    try:
        with patch.object(torch.Tensor, "__format__", text), patch.object(FunctionalTensor, "__repr__", text):
            yield
    finally:
        # The base class has the original methods.
        del torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item


def _numpy(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    array = _TO_NUMPY(tensor, force=True)
    return array.dtype.str, array.shape, array.tobytes()


def _text(tensor: torch.Tensor, *form: str) -> str:
    return _FORMAT(tensor, *form) if form else repr(tensor)


@contextmanager
def undecided() -> Iterator[None]:
    """Inside the block, let `Tensor.tolist`, `Tensor.numpy` and texts that are not only for people (`text_uses`) raise
    DataDependentOutputException, as other reads of traced values do."""

    def refuse(read: Any, *_: Any) -> Any:
        raise DataDependentOutputException(read.__name__.lstrip("_"))

    with asked(refuse):
        yield


class Plainly:
    """A context for calls on real tensors without dispatch modes, gradients and autocast. A class costs less than a
    generator."""

    __slots__ = ("_entered",)

    def __enter__(self) -> None:
        modes = (disable_current_modes(),) if any_mode() else ()
        self._entered = (*modes, torch.no_grad(), DisableAutocast())
        for one in self._entered:
            one.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for one in reversed(self._entered):
            one.__exit__(*raised)
