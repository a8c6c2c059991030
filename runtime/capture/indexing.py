"""Mark the ops of an index of several dimensions, ``x[a, b]``, while a step is traced with symbolic sizes.

In such an index, eager mode skips a slice that covers its whole dimension. With symbolic sizes it is unknown which
slices do, so they are marked and removed later, once the sizes are known.
"""

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
    """Marks, inside the block, all ops that are traced for an index of several dimensions, ``x[a, b, ...]``. Their
    calls in the captured step then have `Call.indexed` set.

    In such an index, eager mode skips a slice that covers its whole dimension. The slice of ``x[a]`` is not marked,
    because eager mode always runs it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is GET_ITEM and isinstance(args[1], tuple):
            with annotate({INDEXED: True}):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
