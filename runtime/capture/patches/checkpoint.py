"""Disable a model's activation checkpointing (`torch.utils.checkpoint`) during capture, because a plan decides which
ops are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint as checkpoints

from rematplan.runtime.graph.compat import CHECKPOINT_GENERATOR


def _run(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    return function(*args)


def _nothing_around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function without saving or recomputing anything, inside the
    block and in this thread. Other threads are not affected, because they may be training a model that needs its
    checkpoints."""
    thread = get_ident()  # all threads see the replaced functions
    with_reentry, without = checkpoints.CheckpointFunction.apply, getattr(checkpoints, CHECKPOINT_GENERATOR)

    def apply(*args: Any) -> Any:
        return (_run if get_ident() == thread else with_reentry)(*args)

    def around(*args: Any, **kwargs: Any) -> Any:
        return (_nothing_around if get_ident() == thread else without)(*args, **kwargs)

    with (
        patch.object(checkpoints, "CheckpointFunction", SimpleNamespace(apply=apply)),
        patch.object(checkpoints, CHECKPOINT_GENERATOR, around),
    ):
        yield
