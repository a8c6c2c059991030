"""Work of a trace that the captured step does not need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental import proxy_tensor

from rematplan.runtime.graph.compat import PhiloxState, lazy_graph_modules

NO_STATE = torch.tensor(())


@contextmanager
def only_what_is_read() -> Iterator[None]:
    """In the block, Python does not search for cycles, tracers do not describe tensors twice (``tensor_meta``), traced
    graphs get code only when they are called, and states of CUDA's generator that no trace uses share a tensor."""
    with (
        no_collection(),
        lazy_graph_modules(True),
        patch.object(PhiloxState, "reset", _without_state),
        patch.object(proxy_tensor, "_extract_tensor_metadata", _nothing),
    ):
        yield


def _without_state(state: Any) -> None:
    state.seed = state.base_offset = NO_STATE
    state.relative_offset, state.offset_advanced_at_least_once = 0, False


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
