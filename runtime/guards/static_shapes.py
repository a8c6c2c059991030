"""Rewriting of calls with data-dependent result shapes to calls with fixed shapes. The shape is computed from
the known values and becomes part of the guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from rematplan.runtime.guards.sized_ops import CTC_LOSS, WITH_SIZES, sizes_of
from rematplan.runtime.guards.tensor_reads import TO_LIST, plainly

ATEN = torch.ops.aten


class Tape(Protocol):
    """The part of `decisions_by_values.OpTape`, which records calls on traced tensors, that the rewriting functions
    in this file need."""

    drawn: dict[int, torch.Tensor]
    """By id, results of ``rand`` that no call has written to since."""

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call and return its result. Record the call if the values of all tensors among its arguments are
        known."""

    def read(self, of: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``of(*arguments)``, computed on the real tensors behind the traced ones. The result becomes part of
        the guard.

        Raises:
            DataDependentOutputException: the values of the tensors are unknown before the step runs.
        """

    def number(self, of: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int | None:
        """Return ``of(tensor)``, computed on the real tensor; None if its values are unknown before the step runs.
        The result becomes part of the guard."""

    def knows(self, value: Any) -> bool:
        """Return whether the values of all tensors in nested arguments are known before the step runs."""


def _rand(tape: Tape, *args: Any, **kwargs: Any) -> Any:
    drawn = tape.run(ATEN.rand.default, *args, **kwargs)
    tape.drawn[id(drawn)] = drawn
    return drawn


def _detach(tape: Tape, x: torch.Tensor) -> Any:
    same = tape.run(ATEN.detach.default, x)
    if id(x) in tape.drawn:
        tape.drawn[id(same)] = same
    return same


def _less(tape: Tape, x: torch.Tensor, limit: float) -> Any:
    """Compare with a limit. Random numbers in [0, 1) are never below a limit of 0 or less, so a layer that is
    dropped at rate 0 does not depend on chance."""
    if id(x) in tape.drawn and limit <= 0:
        return tape.run(ATEN.zeros.default, x.shape, dtype=torch.bool, device=x.device)
    return tape.run(ATEN.lt.Scalar, x, limit)


def _count(mask: torch.Tensor) -> int:
    return int(mask.count_nonzero())


def _greatest(numbers: torch.Tensor) -> int:
    return int(numbers.max())


def _sum(numbers: torch.Tensor) -> int:
    return int(numbers.sum())


def _nonzero(tape: Tape, mask: torch.Tensor) -> Any:
    count = tape.number(_count, mask)
    if count is None:
        return tape.run(ATEN.nonzero.default, mask)
    return tape.run(ATEN.nonzero_static.default, mask, size=count)


def _index(tape: Tape, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    lists: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            lists += tape.run(ATEN.unbind.int, _nonzero(tape, index), 1)
        else:
            lists.append(index)
    return tape.run(ATEN.index.Tensor, x, lists)


def _masked_select(tape: Tape, x: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = list(torch.broadcast_shapes(x.shape, mask.shape)) or [1]
    x, mask = (tape.run(ATEN.expand.default, t, shape) for t in (x, mask))
    return _index(tape, x, [mask])


def _repeat_interleave(tape: Tape, repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    size = tape.number(_sum, repeats) if output_size is None else output_size
    return tape.run(ATEN.repeat_interleave.Tensor, repeats, output_size=size)


def _batch_sizes(lengths: torch.Tensor) -> list[int]:
    """Return the number of sequences that are longer than t, for each time step t."""
    longest = int(lengths[0])  # the kernel refuses lengths that are not sorted
    sizes: list[int] = TO_LIST(
        ATEN._pack_padded_sequence(lengths.new_empty(longest, len(lengths)), lengths, False)[1]
    )
    return sizes


def _pack_padded_sequence(tape: Tape, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Pack sequences. The batch sizes are returned as a real tensor, since recurrent layers and unpacking
    read its memory directly."""
    if not tape.knows(lengths):
        return tape.run(ATEN._pack_padded_sequence.default, x, lengths, batch_first)
    sizes = tape.read(_batch_sizes, lengths)
    x = tape.run(ATEN.transpose.int, x, 0, 1) if batch_first else x
    steps, begin = [], 0
    for size, alike in groupby(sizes):
        end = begin + len(list(alike))
        alive = tape.run(ATEN.slice.Tensor, tape.run(ATEN.slice.Tensor, x, 0, begin, end), 1, 0, size)
        steps.append(tape.run(ATEN.reshape.default, alive, [-1, *x.shape[2:]]))
        begin = end
    with plainly():
        real = torch.tensor(sizes)
    return tape.run(ATEN.cat.default, steps), real


def _ctc_loss(
    tape: Tape,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *more: Any,
) -> Any:
    lengths = input_lengths, target_lengths
    longest = tape.number(_greatest, target_lengths)
    if longest is None:
        return tape.run(ATEN._ctc_loss.Tensor, log_probs, targets, *lengths, *more)
    return tape.run(CTC_LOSS, log_probs, targets, *lengths, longest, *more)


def _found(op: Any) -> Callable[..., Any]:
    """Return the rewriting function of an op whose result shapes only the op itself can compute."""

    def sizes(*arguments: Any) -> list[int]:
        return sizes_of(op(*arguments))

    def static(tape: Tape, *arguments: Any) -> Any:
        if not tape.knows(arguments):
            return tape.run(op, *arguments)
        return tape.run(WITH_SIZES[op], *arguments, sizes=tape.read(sizes, *arguments))

    return static


STATIC: Mapping[Any, Callable[..., Any]] = {
    ATEN.rand.default: _rand,
    ATEN.detach.default: _detach,
    ATEN.lt.Scalar: _less,
    ATEN.nonzero.default: _nonzero,
    ATEN.index.Tensor: _index,
    ATEN.masked_select.default: _masked_select,
    ATEN.repeat_interleave.Tensor: _repeat_interleave,
    ATEN._pack_padded_sequence.default: _pack_padded_sequence,
    ATEN._ctc_loss.Tensor: _ctc_loss,
    **{op: _found(op) for op in WITH_SIZES},
}
"""By op, the function that replaces its call; it takes a tape and the call's arguments. Some functions return
a result that is known whatever numbers are drawn."""
