"""Workspaces of ops at sizes between two at which they were measured.

A workspace is affine in the bytes that an op reads and writes, not in the dimension that varies: measured at two sizes,
the line through both gave peaks of three models right to the byte. Kernels that work in blocks make steps instead of
lines, hence the margin. Beyond the sizes that were measured nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.family.amounts_by_position import Ints

MARGIN = 0.02
"""How much is added to an interpolated workspace, as a share of the larger of the two measured ones; nothing if they
are equal."""


@dataclass(frozen=True, eq=False)
class Workspaces:
    """The ops of a problem, then its inverses: ``traffic``, the bytes that each reads and writes, and ``bytes``, its
    measured workspace."""

    traffic: Ints
    bytes: Ints


def workspaces_of(graph: TrainingGraph) -> Workspaces:
    """Return the workspace of each op and inverse of a problem, and the bytes that it reads and writes."""
    recipes = (*graph.ops, *graph.inverses)
    return Workspaces(traffic_of(graph), np.array([op.workspace for op in recipes], dtype=np.int64))


def traffic_of(graph: TrainingGraph) -> Ints:
    """Return the bytes that each op, then each inverse, reads and writes."""
    size = graph.size
    recipes = (*graph.ops, *graph.inverses)
    return np.array([sum(size[t] for t in (*op.reads, *op.writes)) for op in recipes], dtype=np.int64)


def workspaces_between(low: Workspaces, high: Workspaces, traffic: Ints) -> Ints:
    """Return the workspaces, in bytes, of ops that read and write ``traffic`` bytes, from measurements at a smaller
    (``low``) and a larger size (``high``).

    Where both measurements are equal, so is the result. Otherwise it is on the line through both, as a function of
    the traffic, rounded up, plus `MARGIN` of the larger one. An op whose traffic is equal in both gets the larger
    workspace.

    Raises:
        ProblemError: an op's traffic is not between the measured ones, although its workspaces differ.
    """
    differ = low.bytes != high.bytes
    least, most = np.minimum(low.traffic, high.traffic), np.maximum(low.traffic, high.traffic)
    beyond = differ & ((traffic < least) | (traffic > most))
    if beyond.any():
        at = int(np.flatnonzero(beyond)[0])
        raise ProblemError(
            f"op {at} reads and writes {traffic[at]} bytes, but its workspace was measured only between {least[at]} "
            f"and {most[at]}"
        )
    larger = np.maximum(low.bytes, high.bytes)
    span = high.traffic - low.traffic
    share = np.divide(traffic - low.traffic, span, out=np.ones(span.shape), where=span != 0)
    line = np.ceil(low.bytes + share * (high.bytes - low.bytes) + MARGIN * larger).astype(np.int64)
    return np.where(differ, np.where(span == 0, larger, line), low.bytes)
