"""A model's own checkpoints, which a plan replaces: what is kept and what runs again is for the plan to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.utils.checkpoint as checkpoints

from rematplan.runtime.graph.compat import CHECKPOINT_GENERATOR


def _run(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    return function(*args)


def _nothing_around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


_PASSING: dict[str, Any] = {
    "CheckpointFunction": SimpleNamespace(apply=_run),
    CHECKPOINT_GENERATOR: _nothing_around,
}


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """A block in which `torch.utils.checkpoint.checkpoint` only calls what it is given."""
    before = {name: getattr(checkpoints, name) for name in _PASSING}
    for name, passing in _PASSING.items():
        setattr(checkpoints, name, passing)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(checkpoints, name, own)
