"""Treat an index of several dimensions, ``x[a, b]``, as eager mode does, while a step is traced with symbolic sizes.

Eager mode skips a slice that covers its dimension. ``:`` is not traced; other slices are marked, and removed when
sizes are known. Slices that are written to have no marks and stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

INDEXED = "rematplan.indexed"
"""The key under which a node's annotations say that its op belongs to an index of several dimensions."""
GET_ITEM = torch.Tensor.__getitem__
SET_ITEM = torch.Tensor.__setitem__
BASIC = (int, torch.SymInt, type(None), type(...))


class MarkedIndexing(TorchFunctionMode):
    """Marks, inside the block, all ops of reading an index ``x[a, b, ...]`` (`Call.indexed`). Its slices ``:`` are not
    traced. ``x[a]`` is not marked, because eager mode always runs it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func not in (GET_ITEM, SET_ITEM) or not isinstance(args[1], tuple):
            return func(*args, **(kwargs or {}))
        x, index, *written = args
        with annotate({INDEXED: True}) if func is GET_ITEM else nullcontext():
            if any(map(_is_whole, index)) and all(map(_is_basic, index)) and any(map(_changes, index)):
                part = _part(x, index)
                return func(part, ..., *written) if written else part
            return func(*args, **(kwargs or {}))


def _is_whole(one: Any) -> bool:
    return isinstance(one, slice) and one.start is one.stop is one.step is None


def _changes(one: Any) -> bool:
    return one is not ... and not _is_whole(one)


def _is_basic(one: Any) -> bool:
    """Return whether an entry of an index is a number, ``...``, None, or a slice with numbers and a positive step."""
    if isinstance(one, slice):
        ends = all(isinstance(end, (int, torch.SymInt, type(None))) for end in (one.start, one.stop))
        return ends and (one.step is None or (isinstance(one.step, int) and one.step > 0))
    return isinstance(one, BASIC) and not isinstance(one, bool)


def _part(x: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    """Return the part of ``x`` at an index of several dimensions, of which slices ``:`` are not traced."""
    dim = 0
    # The number of dimensions that the rest of the index has.
    left = sum(one is not None and one is not ... for one in index)
    for one in index:
        if one is ...:
            dim = x.ndim - left
            continue
        left -= one is not None
        if one is None:
            x = x.unsqueeze(dim)
        elif not isinstance(one, slice):
            x = x.select(dim, one)
            continue
        elif not _is_whole(one):
            start, stop = 0 if one.start is None else one.start, sys.maxsize if one.stop is None else one.stop
            x = torch.ops.aten.slice.Tensor(x, dim, start, stop, 1 if one.step is None else one.step)
        dim += 1
    return x
