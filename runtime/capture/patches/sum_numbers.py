"""Number sums of gradients in a traced backward like the forward op whose gradient they add.

PyTorch gives each traced node the sequence number of an autograd node. A node of the backward has the number of the
forward op of which it is the backward. If several ops read a tensor, autograd adds the gradient from each of them to
the sum of those before, directly after the backward of the op. PyTorch gives these additions no number, since it resets
the number when the backward of an op ends. Here, the number stays until the backward of the next op begins.
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
