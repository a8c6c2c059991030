"""Give gradients of outputs the outputs' strides in a capture with symbolic sizes, where PyTorch assumes contiguous
ones.

The backward of a permuted output would make other calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

from rematplan.runtime.graph.compat import MemoryFormatMeta


@contextmanager
def tangents_strided_as_outputs() -> Iterator[None]:
    """Inside the block and in this thread, trace an output's gradient with the output's strides, if sizes are symbolic
    and no elements overlap."""
    tracing, original = get_ident(), MemoryFormatMeta.from_tensor

    def from_tensor(t: torch.Tensor, *options: Any, **named: Any) -> Any:
        if get_ident() == tracing and t._has_symbolic_sizes_strides and not _is_expanded(t):
            return MemoryFormatMeta(size=t.size(), stride=t.stride())
        return original(t, *options, **named)

    with patch.object(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor)):
        yield


def _is_expanded(t: torch.Tensor) -> bool:
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1)
        for size, stride in zip(t.shape, t.stride(), strict=True)
    )
