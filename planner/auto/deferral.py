"""Outputs to compute last, again: gradients that cannot stay while heavier ops run.

What they are computed by runs at first for what else depends on it, and again once all other outputs are there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import Op

Ints = NDArray[np.int64]


def deferred_outputs(
    ops: Sequence[Op], reads: Sequence[Sequence[int]], sizes: Sequence[int], outputs: Sequence[int]
) -> tuple[set[int], int]:
    """Return which outputs, of those that are made first, are better computed last, and the bytes, without inputs, that
    are needed if none is.

    Tensors are numbers in the order in which they are written. What the backward makes for later ops counts as held;
    nothing of the forward does.
    """
    maker = [o for o, op in enumerate(ops) for _ in op.writes]
    held = _working_sets(ops, reads, maker, sizes) + _backward_between(ops, reads, maker, sizes, outputs)
    grown = np.cumsum([0, *(sizes[k] for k in outputs)])
    places = [maker[k] for k in outputs]
    before = grown[np.searchsorted(np.array(places, np.int64), np.arange(len(ops)))]
    total, plain = int(grown[-1]), int((held + before).max(initial=0))
    until = np.maximum.accumulate(held + before)  # the largest sum so far
    least, late = plain, 0
    for count, (bytes_, last) in enumerate(zip(grown[1:].tolist(), places, strict=True), start=1):
        first = int((held + np.maximum(before - bytes_, 0)).max())
        peak = max(first, int(until[last]) + total - bytes_)
        if peak < least:
            least, late = peak, count
    return set(outputs[:late]), plain


def _working_sets(
    ops: Sequence[Op], reads: Sequence[Sequence[int]], maker: Sequence[int], sizes: Sequence[int]
) -> Ints:
    read = [op.workspace + sum(sizes[k] for k in row) for op, row in zip(ops, reads, strict=True)]
    work = np.array(read, np.int64)
    np.add.at(work, np.array(maker, np.int64), np.array(sizes, np.int64))
    return work


def _backward_between(
    ops: Sequence[Op],
    reads: Sequence[Sequence[int]],
    maker: Sequence[int],
    sizes: Sequence[int],
    outputs: Collection[int],
) -> Ints:
    """Return, by op, the bytes of what the backward made before it for later ops, without outputs and what it reads."""
    last = {k: o for o, row in enumerate(reads) for k in row}
    kept = set(last).difference(outputs)
    kept = {k for k in kept if ops[maker[k]].phase == "backward"}
    change = np.zeros(len(ops) + 1, np.int64)
    for k in kept:
        change[maker[k] + 1] += sizes[k]
        change[last[k]] -= sizes[k]
    own = [sum(sizes[k] for k in row if k in kept and last[k] > o) for o, row in enumerate(reads)]
    return np.cumsum(change)[:-1] - np.array(own, np.int64)
