"""Run a model without its own checkpointing, in eager mode."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function

from rematplan.auditing.compiled import in_eager_mode
from rematplan.runtime.capture.patches.autograd_functions import without_own_backwards
from rematplan.runtime.capture.patches.checkpoint import without_checkpoints
from rematplan.runtime.capture.patches.saved_tensors import hooks_replaced


@contextmanager
def plain_path(recomputing: Collection[type[Function]]) -> Iterator[None]:
    """Disable `torch.utils.checkpoint` and hooks on saved tensors, inside the block and in this thread, and
    differentiate the forwards of ``recomputing`` by autograd. Compiled code runs in eager mode."""
    with (
        without_checkpoints(),
        without_own_backwards(recomputing),
        hooks_replaced(lambda _pack, _unpack: (_same, _same)),
        in_eager_mode(),
    ):
        yield


def _same(value: Any) -> Any:
    return value
