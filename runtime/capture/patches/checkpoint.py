"""Disable or watch a model's activation checkpointing (`torch.utils.checkpoint`). A capture disables it, because a plan
decides which ops are recomputed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint as checkpoints

from rematplan.runtime.graph.compat import CHECKPOINT_GENERATOR

BY_NAME = ("torch.distributed._composable.checkpoint_activation",)
"""Modules of PyTorch that import the generator by its name."""

EachRun = Callable[[], AbstractContextManager[None]]


def _run(_original: object, function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    return function(*args)


def _nothing_around(_original: object, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function plainly, inside the block and in this thread."""
    with _replaced(_run, _nothing_around):
        yield


@contextmanager
def watched_checkpoints(watch: Callable[[str, tuple[Any, ...]], EachRun]) -> Iterator[None]:
    """Call ``watch`` for each checkpoint in this thread, with its kind and the arguments (none if it is non-reentrant).
    ``watch`` returns a function that makes a context for each run of the checkpoint's function."""

    def told(function: Callable[..., Any], each_run: EachRun) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with each_run():
                return function(*args, **kwargs)

        return run

    def apply(original: Callable[..., Any], function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return original(told(function, watch("reentrant", args)), preserve, *args)

    def around(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        each_run = watch("non-reentrant", ())
        with each_run():  # the caller runs the function while the generator waits
            yield from original(told(function, each_run), *args, **kwargs)

    with _replaced(apply, around):
        yield


@contextmanager
def _replaced(reentrant: Callable[..., Any], around: Callable[..., Any]) -> Iterator[None]:
    """Replace what runs checkpoints of both kinds, inside the block and in this thread. The replacements get what they
    replace as their first argument."""
    thread = get_ident()  # all threads see the replaced functions
    with_reentry, without = checkpoints.CheckpointFunction.apply, getattr(checkpoints, CHECKPOINT_GENERATOR)

    def apply(*args: Any) -> Any:
        return reentrant(with_reentry, *args) if get_ident() == thread else with_reentry(*args)

    def generator(*args: Any, **kwargs: Any) -> Any:
        return around(without, *args, **kwargs) if get_ident() == thread else without(*args, **kwargs)

    loaded = (sys.modules[name] for name in BY_NAME if name in sys.modules)
    with ExitStack() as stack:
        stack.enter_context(patch.object(checkpoints, "CheckpointFunction", SimpleNamespace(apply=apply)))
        for owner in (checkpoints, *(m for m in loaded if hasattr(m, CHECKPOINT_GENERATOR))):
            stack.enter_context(patch.object(owner, CHECKPOINT_GENERATOR, generator))
        yield
