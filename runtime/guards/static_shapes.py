"""Calls whose results' shapes depend on values, as calls whose results have the shape that was decided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from rematplan.runtime.guards.sized_ops import CTC_LOSS, TOLD, sizes_of
from rematplan.runtime.guards.tensor_reads import TO_LIST, plainly

ATEN = torch.ops.aten


class Tape(Protocol):
    """What a row needs of the tape on which calls are noted (`guards.values`)."""

    drawn: dict[int, torch.Tensor]
    """By id, the results of ``rand`` that nothing has written to since."""

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call, and note it if everything that it depends on is known."""

    def read(self, of: Callable[..., Any], *given: Any) -> Any:
        """A function of the values of known tensors; the outcome becomes part of the guard."""

    def number(self, of: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int | None:
        """As `read`, for a number; None if the tensor's values are not known."""

    def knows(self, given: Any) -> bool:
        """Whether the values of all tensors in nested arguments are known."""


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
    """None of what `rand` gives is below 0: that a layer is not dropped at a rate of 0 is no matter of chance."""
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
    """How many sequences reach each step."""
    longest = int(lengths[0])  # of sorted ones; the kernel refuses others
    sizes: list[int] = TO_LIST(
        ATEN._pack_padded_sequence(lengths.new_empty(longest, len(lengths)), lengths, False)[1]
    )
    return sizes


def _pack_padded_sequence(tape: Tape, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """The sizes are a real tensor: recurrent layers and what pads again read them where they lie."""
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
    """For an op whose results' sizes only itself can say."""

    def sizes(*given: Any) -> list[int]:
        return sizes_of(op(*given))

    def static(tape: Tape, *given: Any) -> Any:
        if not tape.knows(given):
            return tape.run(op, *given)
        return tape.run(TOLD[op], *given, sizes=tape.read(sizes, *given))

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
    **{op: _found(op) for op in TOLD},
}
"""By op, how its call is made instead: for a tape, with the call's arguments. Among them is what is known of a result
whatever is drawn."""
