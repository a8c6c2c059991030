"""Passes over a step: gradients that cannot stay while heavier ops run are computed in a later pass.

What they are computed by runs in the first pass for what else depends on it, and again in theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from rematplan.ir import Op
from rematplan.planner.core.array_types import Ints

MOST_PASSES = 4
GROUPS = 48
"""Outputs are split between passes only at so many places, with about as many bytes between them."""


class Passes(NamedTuple):
    """A division of a step's outputs into passes. The first pass computes the outputs that are written last."""

    peak: int
    """Bytes, without inputs, that are needed if the backward's results stay and the forward's do not."""
    outputs: tuple[tuple[int, ...], ...]
    """For each pass, the numbers of its outputs."""


def passes_of(
    ops: Sequence[Op],
    reads: Sequence[Sequence[int]],
    work: Sequence[int],
    sizes: Sequence[int],
    outputs: Sequence[int],
) -> list[Passes]:
    """Return, for each number of passes from 1 on, the division of ``outputs`` with the least peak. The list ends with
    `MOST_PASSES` passes, or before a number that lowers the peak no further. Tensors are numbers in the order in which
    they are written. ``reads``: tensors by op. ``work``: working sets by op, in bytes. ``sizes``: bytes by tensor.
    ``outputs``: ascending."""
    maker = [o for o, op in enumerate(ops) for _ in op.writes]
    held = np.array(work, np.int64) + _backward_between(ops, reads, maker, sizes, outputs)
    grown = np.cumsum([0, *(sizes[k] for k in outputs)], dtype=np.int64)
    places = [maker[k] for k in outputs]
    before = grown[np.searchsorted(np.array(places, np.int64), np.arange(len(ops)))]
    total = int(grown[-1])
    ends = sorted({*np.searchsorted(grown, np.linspace(0, total, GROUPS + 1)).tolist(), 0, len(outputs)})

    def peak(first: int, end: int) -> int:
        """Return the peak of a pass for the outputs from ``first`` to ``end`` − 1, while all later outputs are
        resident."""
        until = len(ops) if end == len(outputs) else places[end - 1] + 1
        mine = np.clip(before[:until], grown[first], grown[end]) - grown[first]
        return int((held[:until] + mine).max(initial=0)) + total - int(grown[end])

    rows = {end: [(peak(first, end), first) for first in ends if first < end] for end in ends[1:]}
    # By number of outputs: the least peak of passes for them, and where each of these ends.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    found: list[Passes] = []
    for _ in range(MOST_PASSES):
        best = {
            end: min(
                (max(own, best[first][0]), (*best[first][1], end)) for own, first in row if first in best
            )
            for end, row in rows.items()
            if any(first in best for _, first in row)
        }
        if len(outputs) not in best or (found and best[len(outputs)][0] >= found[-1].peak):
            break
        least, stops = best[len(outputs)]
        pairs = list(zip((0, *stops), stops, strict=False))
        found.append(Passes(least, tuple(tuple(outputs[a:b]) for a, b in reversed(pairs))))
    return found or [Passes(int(held.max(initial=0)), (tuple(outputs),))]


def _backward_between(
    ops: Sequence[Op],
    reads: Sequence[Sequence[int]],
    maker: Sequence[int],
    sizes: Sequence[int],
    outputs: Collection[int],
) -> Ints:
    """Return, for each op, the bytes of earlier results of the backward that later ops read, without outputs and
    without what the op itself reads. ``maker``: by tensor, the op that writes it."""
    last = {k: o for o, row in enumerate(reads) for k in row}
    kept = set(last).difference(outputs)
    kept = {k for k in kept if ops[maker[k]].phase == "backward"}
    change = np.zeros(len(ops) + 1, np.int64)
    for k in kept:
        change[maker[k] + 1] += sizes[k]
        change[last[k]] -= sizes[k]
    own = [sum(sizes[k] for k in row if k in kept and last[k] > o) for o, row in enumerate(reads)]
    return np.cumsum(change)[:-1] - np.array(own, np.int64)
