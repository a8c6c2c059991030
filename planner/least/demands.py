"""A planning problem as arrays for the regression search (`regression`), without small tensors.

Their sizes count as 0, which only lowers bounds; `Demands.left_out` is what a construction may lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.arrays.csr import compressed_rows
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.array_types import Flags, Ints, Words

NEVER = 2**61
"""The value (`Tables.value`) of a tensor that cannot be computed from nothing, because an op that it needs may run only
once."""


class Tables(NamedTuple):
    """The problem for compiled loops, without inputs. Op v reads ``reads[reads_at[v]:reads_at[v + 1]]`` and writes
    ``writes[writes_at[v]:writes_at[v + 1]]``; tensors left out are not there."""

    reads_at: Ints
    reads: Ints
    writes_at: Ints
    writes: Ints
    workspace: Ints
    once: Flags
    """By op: whether it may run only once."""
    maker: Ints
    """By tensor: the op that writes it."""
    size: Ints
    ancestors: Words
    """By tensor: the set of tensors that it is computed from, as bits."""
    hashes: Words
    """By tensor: a random number. A set of tensors is identified by the exclusive or of theirs."""
    value: Ints
    """By tensor: a peak, in bytes without the inputs, within which it can be computed from nothing."""


@dataclass(frozen=True)
class Demands:
    """A planning problem for the regression search."""

    ops: tuple[Op, ...]
    """The ops that every plan runs."""
    reads: tuple[tuple[int, ...], ...]
    """By op: the numbers of all tensors that it reads, inputs excepted."""
    writes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    """By tensor: its true size."""
    large: tuple[bool, ...]
    """By tensor: whether it is in ``tables``."""
    outputs: tuple[int, ...]
    backward: tuple[bool, ...]
    """By op: whether it is of the backward half."""
    is_once: tuple[bool, ...]
    """By op: whether it may run only once."""
    inputs: int
    """Bytes of the inputs."""
    left_out: int
    """Bytes of all tensors left out."""
    after_once: frozenset[int]
    """Tensors that are not eliminated: what ops that may run only once write, and what is computed from that. If all
    that such an op writes is left out, this does not matter: its results stay resident."""
    tables: Tables

    @property
    def work(self) -> Ints:
        """The bytes that each op needs for what it reads and writes and for its workspace."""
        t = self.tables
        both = [{*r, *w} for r, w in zip(self.reads, self.writes, strict=True)]
        own = [sum(int(t.size[k]) for k in one) for one in both]
        return np.array(own, dtype=np.int64) + t.workspace

    def large_of(self, tensors: Sequence[int]) -> list[int]:
        """Return those of ``tensors`` that are in ``tables``."""
        return [t for t in tensors if self.large[t]]


def demands_of(graph: TrainingGraph, tiny: float = 0.001, smallest: int = 0) -> Demands:
    """Return a problem for the regression search, without inverses. ``tiny``: the smallest tensors that are not outputs
    are left out while their bytes sum to at most this share of the largest working set. With them, and with
    ``smallest``, all tensors of at most so many bytes are left out. Of an op that may run only once, all results are
    left out or none."""
    ops, inputs, once = tuple(needed_ops(graph)), set(graph.inputs), set(graph.never_rerun)
    # An op that writes nothing must run all the same: it gets an output of no bytes, with the op's own name.
    made = tuple(op.writes or (f"({op.name})",) for op in ops)
    number = {t: k for k, t in enumerate(t for row in made for t in row)}
    sizes = tuple(graph.size.get(t, 0) for t in number)
    reads = tuple(tuple(dict.fromkeys(number[t] for t in op.reads if t not in inputs)) for op in ops)
    writes = tuple(tuple(number[t] for t in row) for row in made)
    silent = {row[0] for op, row in zip(ops, made, strict=True) if not op.writes}
    outputs = tuple(k for t, k in number.items() if t in silent or t in graph.outputs)
    largest = max(
        (sum(sizes[t] for t in {*r, *w}) + op.workspace for r, w, op in zip(reads, writes, ops, strict=True)),
        default=0,
    )
    spared = {k for t, k in number.items() if t in silent}
    smallest = max(smallest, _threshold([n for t, n in enumerate(sizes) if t not in outputs], tiny * largest))
    out = {t for t, n in enumerate(sizes) if n <= smallest and t not in spared}
    # If an op may run only once, all of its results are left out or none. A loss writes a tensor of no bytes, and every
    # gradient reads it: without that tensor, nothing would say that gradients come after the loss.
    for op, row in zip(ops, writes, strict=True):
        if op.name in once and not out.issuperset(row):
            out.difference_update(row)
    kept_once = [op.name in once and not out.issuperset(row) for op, row in zip(ops, writes, strict=True)]
    large = tuple(t not in out for t in range(len(sizes)))
    kept = np.array([n if large[t] else 0 for t, n in enumerate(sizes)], dtype=np.int64)
    reads_at, read = compressed_rows([[t for t in row if large[t]] for row in reads])
    writes_at, written = compressed_rows([[t for t in row if large[t]] for row in writes])
    maker = np.array([v for v, row in enumerate(writes) for _ in row], dtype=np.int64)
    hashes = np.random.default_rng(1).integers(1, 2**63, len(sizes), dtype=np.uint64)
    tables = Tables(
        reads_at, read, writes_at, written,
        workspace=np.array([op.workspace for op in ops], dtype=np.int64),
        once=np.array(kept_once, dtype=np.bool_),
        maker=maker, size=kept, ancestors=_ancestors(reads, writes, large), hashes=hashes,
        value=np.zeros(len(sizes), dtype=np.int64),
    )  # fmt: skip
    backward = tuple(op.phase == "backward" for op in ops)
    left = sum(sizes[t] for t in out)
    fixed, after = graph.input_bytes, frozenset(_after_once(kept_once, reads, writes))
    single = tuple(op.name in once for op in ops)
    return Demands(ops, reads, writes, sizes, large, outputs, backward, single, fixed, left, after, tables)


def _after_once(
    once: Sequence[bool], reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]
) -> set[int]:
    """Return the tensors that the ops marked in ``once`` write, and all tensors computed from these."""
    after: set[int] = set()
    for single, row, made in zip(once, reads, writes, strict=True):
        if single or not after.isdisjoint(row):
            after.update(made)
    return after


def _threshold(sizes: Sequence[int], most: float) -> int:
    """Add up ``sizes`` in ascending order while the sum is at most ``most``. Return the last size added; 0 if none
    was."""
    total, threshold = 0, 0
    for size in sorted(sizes):
        total += size
        if total > most:
            break
        threshold = size
    return threshold


def _ancestors(
    reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]], large: Sequence[bool]
) -> Words:
    """Return, by tensor, the set of large tensors that it is computed from, as bits."""
    count = sum(map(len, writes))
    ancestors = np.zeros((count, (count + 63) // 64), dtype=np.uint64)
    for row, made in zip(reads, writes, strict=True):
        own = np.zeros(ancestors.shape[1], dtype=np.uint64)
        for t in row:
            own |= ancestors[t]
            if large[t]:
                own[t >> 6] |= np.uint64(1) << np.uint64(t & 63)
        for t in made:
            ancestors[t] = own
    return ancestors
