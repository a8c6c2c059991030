"""Replacement of calls whose result shapes depend on values by calls with fixed shapes, which become part of the
guard, if values are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from rematplan.runtime.guards.data_dependent_ops import CTC_LOSS, WITH_SIZES, sizes_of
from rematplan.runtime.guards.tensor_reads import TO_LIST, Plainly

ATEN = torch.ops.aten


class Tape(Protocol):
    """What this file needs of a `decisions_by_values.OpTape`, which records a trace's calls and computes known
    values on real tensors."""

    drawn: dict[int, torch.Tensor]
    """By id, results of ``rand`` that no call has written to since."""

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a call and return its result. Record the call if the values of all its tensor arguments are known."""

    def sized(self, func: Any, plain: Any, tensor: torch.Tensor, **sizes: Any) -> Any:
        """Execute ``func(tensor, **sizes)`` and return its result. Record it as ``plain(tensor)``, which has the same
        result, but finds the sizes itself."""

    def read(self, of: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``of(*arguments)`` for the real tensors, recorded as a decision that the guard checks."""

    def count(self, of: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int | torch.SymInt | None:
        """Return ``of(tensor)`` of the real tensor, recorded as a size, maybe as a symbol; None if unknown."""

    def knows(self, value: Any) -> bool:
        """Return whether all tensors in nested arguments have values that depend on no trained parameter or
        unrepeatable draw."""


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
    """Return ``x < limit``; zeros, without comparing, if ``x`` is a result of ``rand`` and the limit is 0 or less."""
    # A layer that is dropped at rate 0 does not depend on chance.
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
    count = tape.count(_count, mask)
    if count is None:
        return tape.run(ATEN.nonzero.default, mask)
    return tape.sized(ATEN.nonzero_static.default, ATEN.nonzero.default, mask, size=count)


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
    op = ATEN.repeat_interleave.Tensor
    size = tape.count(_sum, repeats) if output_size is None else None
    if size is None:
        return tape.run(op, repeats, output_size=output_size)
    return tape.sized(op, op, repeats, output_size=size)


def _batch_sizes(lengths: torch.Tensor) -> list[int]:
    """Return, for each time step t, the number of sequences that are longer than t. ``lengths``: of the sequences, in
    descending order."""
    longest = int(lengths[0])  # the kernel refuses lengths that are not sorted
    sizes: list[int] = TO_LIST(
        ATEN._pack_padded_sequence(lengths.new_empty(longest, len(lengths)), lengths, False)[1]
    )
    return sizes


def _pack_padded_sequence(tape: Tape, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Pack padded sequences by calls of fixed shapes. Return the packed tensor and the number of sequences at each time
    step. If ``lengths`` is unknown, call the op itself."""
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
    with Plainly():
        # A real tensor: recurrent layers and unpacking read its memory directly.
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
    longest = tape.count(_greatest, target_lengths)
    if longest is None:
        return tape.run(ATEN._ctc_loss.Tensor, log_probs, targets, *lengths, *more)
    return tape.run(CTC_LOSS, log_probs, targets, *lengths, longest, *more)


def _found(op: Any) -> Callable[..., Any]:
    """Return a replacement of calls of an op. With known arguments, it calls the op's variant in `WITH_SIZES`, with the
    shapes found on the real tensors; else the op itself."""

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
"""By op, the function that replaces its calls; it takes a tape and the call's arguments. Some of the functions
replace calls on random numbers whose result is the same for all random numbers."""
