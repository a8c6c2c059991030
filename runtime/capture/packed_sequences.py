"""Refuse captures of RNNs on packed sequences, whose graph depends on all lengths of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence

from rematplan.ir import CapturedAnew


@contextmanager
def no_packed_sequences(name: str) -> Iterator[None]:
    """Raise `CapturedAnew` if this thread calls an RNN of PyTorch with a packed sequence inside the block. ``name``:
    the model's, for the message."""
    thread = get_ident()  # the hook runs in all threads

    def refuse(module: nn.Module, args: Any) -> None:
        if get_ident() != thread or not isinstance(module, nn.RNNBase):
            return
        if args and isinstance(args[0], PackedSequence):
            raise CapturedAnew(
                f"{name} calls {type(module).__name__} with packed sequences, of which each combination of lengths "
                f"has another graph"
            )

    hook = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
