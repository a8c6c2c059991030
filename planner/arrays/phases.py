"""Infer which ops of a training step are forward and which backward, where that is not stated or stated wrongly.

The backward half reads the forward half's tensors in the opposite order: what was written last is read first. No
other kind of graph does so as strictly: the rank correlation is below -0.99 for networks, and above -0.8 for random
layered graphs in depth-first order.

Phases only tell a search where to look. They do not change which schedules are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.caches.graph_cache import cached_on

FEWEST = 8
"""If fewer tensors than this are live between the halves, their order proves nothing."""
MIRRORED, CLEARLY = -0.95, -0.99
"""The graph is a training step if the rank correlation, between the time a tensor is written and the time it is
read next, is at most this: the first at the likeliest end of the forward half, the second at the others that are tried,
since one of many may correlate by chance."""

NEARLY, CANDIDATES = 0.9, 12
"""As ends of the forward half, so many ops are tried at most, after which at least this share of the largest number of
tensors is still to be read."""
WAITING = 0.95
"""Stated phases contradict the graph if the number of tensors that are live between the stated halves is less than
this share of the number between the inferred halves."""

Floats = NDArray[np.float64]


def phase_views(graph: TrainingGraph) -> tuple[TrainingGraph, ...]:
    """Return the problem once for each division of its ops into forward and backward that is worth trying, the most
    plausible first.

    A problem looks like a training step if the tensors written last before some op are read first after that op. If
    it does, and states no phases, the only result has inferred phases. If the stated phases contradict the graph,
    because too few tensors are live between the halves (`WAITING`), the first result has inferred phases and the
    second the stated ones. In all other cases the result is the problem itself.
    """
    inferred = cached_on(graph, "inferred phases", lambda: _inferred(graph))
    if inferred is None:
        return (graph,)
    return (inferred, graph) if graph.has_phases else (inferred,)


def infer_phases(graph: TrainingGraph) -> TrainingGraph:
    """Return the problem with its ops marked as forward or backward: with the most plausible of the divisions that
    `phase_views` returns.

    It is ``graph`` itself if its phases are plausible, or if it does not look like a training step.
    """
    return phase_views(graph)[0]


def contradiction(graph: TrainingGraph) -> str:
    """Return a sentence for the user that says how many stated phases contradict the graph; empty if none do."""
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
    """Return the problem with inferred phases; None if its own are plausible or none can be inferred."""
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
    """Return the number of tensors that the forward half writes and an op outside of it reads.

    ``forward[o]``: whether op o belongs to the forward half.
    """
    return sum(
        p >= 0 and forward[p] and not all(forward[r] for r in reads)
        for p, reads in zip(ix.producer, ix.readers, strict=True)
    )


def _last_forward_op(ix: Indexed) -> int:
    """Return the last forward op if the graph looks like a training step, else -1.

    It is the op after which most tensors are still to be read; they must be read in the opposite order of writing. If
    they are not, ops after which nearly as many are to be read follow: a last op of the forward half that reads many
    tensors, such as a concatenation, comes after the op of the most.
    """
    spans = [(p, reads[-1]) for p, reads in zip(ix.producer, ix.readers, strict=True) if p >= 0 and reads]
    if not spans:
        return -1
    change = np.zeros(len(ix.ops) + 1, dtype=np.int64)
    for written, last in spans:
        change[written] += 1
        change[last] -= 1
    waiting = np.cumsum(change)
    likely = np.argsort(-waiting, kind="stable")[:CANDIDATES]
    likely = likely[waiting[likely] >= NEARLY * waiting.max()]
    limits = (MIRRORED, *[CLEARLY] * (CANDIDATES - 1))
    pairs = zip(likely.tolist(), limits, strict=False)
    return next((at for at, limit in pairs if _read_order(ix, at) <= limit), -1)


def _read_order(ix: Indexed, last_forward: int) -> float:
    """Return the rank correlation between the times at which tensors are written, up to op ``last_forward``, and the
    times at which they are read next after it; 0 if there are too few such tensors."""
    across = [
        (p, next(r for r in reads if r > last_forward))
        for p, reads in zip(ix.producer, ix.readers, strict=True)
        if 0 <= p <= last_forward and reads and reads[-1] > last_forward
    ]
    if len(across) < FEWEST:
        return 0.0
    return _correlation(*(_ranks(np.array(column)) for column in zip(*across, strict=True)))


def _ranks(values: NDArray[np.int64]) -> Floats:
    """Return ranks; equal values get the mean of their ranks."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Floats = np.cumsum(counts) - (counts - 1) / 2
    return means[where]


def _correlation(a: Floats, b: Floats) -> float:
    """Return the correlation of two rankings; 0 if all values of one are equal."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0
