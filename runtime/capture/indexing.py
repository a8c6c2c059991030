"""Notes which slices come from an index of several dimensions: of those eager mode leaves out the ones that are all of
a dimension, which it cannot know while sizes are open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

INDEXED = "rematplan.indexed"
"""The key under which a node's annotations say that its op is of an index of several dimensions."""
GET_ITEM = torch.Tensor.__getitem__


class MarkedIndexing(TorchFunctionMode):
    """A block in which the ops of ``x[a, b, ...]`` are marked. ``x[a]`` is a slice also where it is all of ``x``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is GET_ITEM and isinstance(args[1], tuple):
            with annotate({INDEXED: True}):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
