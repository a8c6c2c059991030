"""Run a model without its own checkpointing, in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

from torch.autograd import Function

from rematplan.auditing.compiled import in_eager_mode
from rematplan.runtime.capture.patches.autograd_functions import without_own_backwards
from rematplan.runtime.capture.patches.checkpoint import without_checkpoints
from rematplan.runtime.graph.compat import PUSH_SAVED_TENSORS_HOOKS, c_autograd


@contextmanager
def plain_path(recomputing: Collection[type[Function]]) -> Iterator[None]:
    """Disable `torch.utils.checkpoint` and hooks on saved tensors, inside the block and in this thread, and
    differentiate the forwards of ``recomputing`` by autograd. Compiled code runs in eager mode."""
    thread, push = get_ident(), getattr(c_autograd, PUSH_SAVED_TENSORS_HOOKS)

    def pushed(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        if get_ident() == thread:
            push(_same, _same)
        else:
            push(pack, unpack)

    with (
        without_checkpoints(),
        without_own_backwards(recomputing),
        patch.object(c_autograd, PUSH_SAVED_TENSORS_HOOKS, pushed),
        in_eager_mode(),
    ):
        yield


def _same(value: Any) -> Any:
    return value
