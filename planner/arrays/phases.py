"""Infer forward and backward if a problem does not state them or its graph contradicts them: the backward
reads in the opposite order of writing.

The rank correlation was below -0.99 for networks and above -0.8 for random layered graphs. Phases do not
change which schedules are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.array_types import Floats

FEWEST = 8
"""If fewer tensors than this are live between the halves, the order in which they are read proves nothing."""
MIRRORED, CLEARLY = -0.95, -0.99
"""A graph is taken for a training step if the rank correlation, between the times at which tensors are written and read
next, is at most this. `MIRRORED` is for the likeliest last forward op. `CLEARLY` is for the other candidates, because
one of many may correlate by chance."""

NEARLY, CANDIDATES = 0.9, 12
"""The candidates for the last forward op: at most `CANDIDATES` ops. After each of them, the number of tensors still to
be read is at least `NEARLY` times the largest such number."""
WAITING = 0.95
"""Stated phases contradict the graph if the number of tensors that are live between the stated halves is less than
this share of the number between the inferred halves."""


def phase_views(graph: TrainingGraph) -> tuple[TrainingGraph, ...]:
    """Return the versions of the problem to plan with, the most plausible first. Only ``graph`` is returned if no
    phases can be inferred or the stated ones are plausible. Else the problem with inferred phases comes first, then
    ``graph`` if it states phases."""
    inferred = cached_on(graph, "inferred phases", lambda: _inferred(graph))
    if inferred is None:
        return (graph,)
    # The stated phases are the second version, if they contradict the graph (`WAITING`).
    return (inferred, graph) if graph.has_phases else (inferred,)


def infer_phases(graph: TrainingGraph) -> TrainingGraph:
    """Return the problem with its most plausible phases: ``graph`` itself, or a copy with inferred ones."""
    return phase_views(graph)[0]


def contradiction(graph: TrainingGraph) -> str:
    """Return a message that says for how many ops stated and inferred phases differ; empty without a
    contradiction.
    """
    views = phase_views(graph)
    if len(views) == 1:
        return ""
    pairs = zip(views[0].ops, graph.ops, strict=True)
    differing = sum(inferred.phase != (stated.phase or "forward") for inferred, stated in pairs)
    return (
        f"{graph.name}: the stated phases of {differing} of {len(graph.ops)} ops contradict the order in which the "
        f"graph reads its tensors; plans are made with the stated phases and with those inferred from the graph"
    )


def _inferred(graph: TrainingGraph) -> TrainingGraph | None:
    """Return the problem with inferred phases; None if its phases are plausible or it does not look like a
    training step.
    """
    ix = indexed(graph)
    last_forward = _last_forward_op(ix)
    if last_forward < 0:
        return None
    if graph.has_phases:
        inferred = tuple(at <= last_forward for at in range(len(ix.ops)))
        if _live_between(ix, ix.forward) >= WAITING * _live_between(ix, inferred):
            return None
    ops = (
        replace(op, phase="forward" if at <= last_forward else "backward") for at, op in enumerate(graph.ops)
    )
    return replace(graph, ops=tuple(ops))


def _live_between(ix: Indexed, forward: Sequence[bool]) -> int:
    """Return how many tensors a forward op writes and an op that is not forward reads."""
    return sum(
        p >= 0 and forward[p] and not all(forward[r] for r in reads)
        for p, reads in zip(ix.producer, ix.readers, strict=True)
    )


def _last_forward_op(ix: Indexed) -> int:
    """Return the position of the last forward op if the graph looks like a training step, else -1."""
    spans = [(p, reads[-1]) for p, reads in zip(ix.producer, ix.readers, strict=True) if p >= 0 and reads]
    if not spans:
        return -1
    change = np.zeros(len(ix.ops) + 1, dtype=np.int64)
    for written, last in spans:
        change[written] += 1
        change[last] -= 1
    waiting = np.cumsum(change)
    # The op after which most tensors are still to be read, and others almost like it: a forward that ends
    # with a concatenation reads many for the last time.
    likely = np.argsort(-waiting, kind="stable")[:CANDIDATES]
    likely = likely[waiting[likely] >= NEARLY * waiting.max()]
    limits = (MIRRORED, *[CLEARLY] * (CANDIDATES - 1))
    pairs = zip(likely.tolist(), limits, strict=False)
    return next((at for at, limit in pairs if _read_order(ix, at) <= limit), -1)


def _read_order(ix: Indexed, last_forward: int) -> float:
    """Return the rank correlation of two orders of the tensors live after op ``last_forward``: of writing, and of the
    next read. It is 0 for fewer than `FEWEST` tensors."""
    across = [
        (p, next(r for r in reads if r > last_forward))
        for p, reads in zip(ix.producer, ix.readers, strict=True)
        if 0 <= p <= last_forward and reads and reads[-1] > last_forward
    ]
    if len(across) < FEWEST:
        return 0.0
    return _correlation(*(_ranks(np.array(column)) for column in zip(*across, strict=True)))


def _ranks(values: NDArray[np.int64]) -> Floats:
    """Return the rank of each value, from 1 for the smallest. Equal values get the mean of their ranks."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Floats = np.cumsum(counts) - (counts - 1) / 2
    return means[where]


def _correlation(a: Floats, b: Floats) -> float:
    """Return the correlation coefficient of two arrays of ranks; 0 if all values of one array are equal."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0
