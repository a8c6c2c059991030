"""Make `torch.tensor` of a list of tensors visible to a tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce, wraps
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

LISTING = ("tensor", "as_tensor")
"""PyTorch's functions that make a tensor of nested lists, in which there may be tensors."""


@contextmanager
def lists_of_tensors_stacked() -> Iterator[None]:
    """Inside the block and in this thread, let `torch.tensor` and `torch.as_tensor` of nested lists stack the 0-d
    tensors in them. Lists with other tensors, or none, are left to PyTorch."""
    thread = get_ident()  # all threads see the replaced functions

    def stacking(own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``own``; in this thread, and without positional arguments besides ``data``, it
        stacks the tensors of nested lists instead."""

        @wraps(own)
        def made(data: Any, *args: Any, requires_grad: bool = False, **options: Any) -> Any:
            if requires_grad:
                options["requires_grad"] = True
            if get_ident() != thread or args or not _lists_tensors(data):
                return own(data, *args, **options)
            # They would read the tensors' memory, which a tracer's tensors do not have.
            return _stacked(data, **options)

        return made

    with ExitStack() as stack:
        for name in LISTING:
            stack.enter_context(patch.object(torch, name, stacking(getattr(torch, name))))
        yield


def _lists_tensors(data: Any) -> bool:
    leaves = list(_leaves(data))
    scalars = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return bool(scalars) and data is not scalars[0] and not any(leaf.ndim for leaf in scalars)


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, (list, tuple)):
        for one in data:
            yield from _leaves(one)
    else:
        yield data


def _stacked(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> torch.Tensor:
    del pin_memory  # of no effect on values
    with torch.no_grad():
        kind = dtype or reduce(torch.promote_types, map(_type, _leaves(data)))
        made = _stack(data, kind, torch.get_default_device() if device is None else torch.device(device))
    return made.requires_grad_(requires_grad)


def _type(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.tensor(leaf).dtype


def _stack(data: Any, kind: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stack(one, kind, device) for one in data])
    if isinstance(data, torch.Tensor):
        return data.to(device, kind)
    return torch.tensor(data, dtype=kind, device=device)
