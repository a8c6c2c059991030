"""Work of a trace that the captured step does not need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.fx.experimental import proxy_tensor


@contextmanager
def only_what_is_read() -> Iterator[None]:
    """In the block, Python does not search for cycles, and tracers do not describe tensors twice (``tensor_meta``)."""
    with no_collection(), patch.object(proxy_tensor, "_extract_tensor_metadata", _nothing):
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside the block, Python does not search for cycles of objects: a trace makes many objects, and few cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _nothing(_tensor: object) -> None:
    return None
