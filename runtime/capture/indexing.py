"""Marking of slices in an index of several dimensions. Eager mode skips those that cover a whole dimension,
which is unknown while sizes are open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

INDEXED = "rematplan.indexed"
"""The key under which a node's annotations say that its op belongs to an index of several dimensions."""
GET_ITEM = torch.Tensor.__getitem__


class MarkedIndexing(TorchFunctionMode):
    """Marks, inside the block, the traced ops of an index of several dimensions, ``x[a, b, ...]``: their calls in the
    captured step have `Call.indexed` set. The op of ``x[a]`` is not marked, since eager mode runs it even if it
    covers all of ``x``, while it skips a slice among several that covers its whole dimension."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is GET_ITEM and isinstance(args[1], tuple):
            with annotate({INDEXED: True}):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
