"""Number sums of gradients in a traced backward like the forward op whose gradient they add.

If several ops read a tensor, autograd adds each gradient directly after the op's backward, but PyTorch resets the
number then. Here it stays until the next op's backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.fx import traceback


@contextmanager
def sums_of_gradients_numbered() -> Iterator[None]:
    """Inside this block, a sum of gradients is traced with the number of the op whose gradient it adds."""
    begin, end = traceback.set_grad_fn_seq_nr, traceback.reset_grad_fn_seq_nr

    def end_last() -> None:
        if traceback.current_meta.get("in_grad_fn"):  # a trace that failed has left no number
            end()

    def begin_next(number: int) -> None:
        end_last()
        begin(number)

    with (
        patch.object(traceback, "set_grad_fn_seq_nr", begin_next),
        patch.object(traceback, "reset_grad_fn_seq_nr", lambda: None),
    ):
        try:
            yield
        finally:
            end_last()
