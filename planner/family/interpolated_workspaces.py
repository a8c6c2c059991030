"""Interpolate the workspaces of ops at sizes between two sizes at which they were measured.

The workspace is interpolated linearly in the bytes that the op reads and writes, not in the size of the dimension
that varies: for three models the peaks were then exact to the byte. A margin is added because the workspace of
kernels that work in blocks grows in steps. Workspaces are not extrapolated beyond the measured sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.family.amounts_by_position import Ints

MARGIN = 0.02
"""What is added to an interpolated workspace, as a share of the larger of the two measured workspaces. Nothing is
added if the two are equal."""


@dataclass(frozen=True, eq=False)
class Workspaces:
    """The workspaces of the ops of a problem, then of its inverses.

    ``traffic``: the bytes that each op or inverse reads and writes. ``bytes``: the workspace of each.
    """

    traffic: Ints
    bytes: Ints


def workspaces_of(graph: TrainingGraph) -> Workspaces:
    """Return the workspaces of a problem's ops, then of its inverses, together with the bytes that each reads and
    writes."""
    recipes = (*graph.ops, *graph.inverses)
    return Workspaces(traffic_of(graph), np.array([op.workspace for op in recipes], dtype=np.int64))


def traffic_of(graph: TrainingGraph) -> Ints:
    """Return the bytes that each op of a problem reads and writes, followed by those of each inverse."""
    size = graph.size
    recipes = (*graph.ops, *graph.inverses)
    return np.array([sum(size[t] for t in (*op.reads, *op.writes)) for op in recipes], dtype=np.int64)


def workspaces_between(low: Workspaces, high: Workspaces, traffic: Ints) -> Ints:
    """Return the workspaces, in bytes, of the ops and inverses of a problem at a size between two measured ones.

    If the two measured workspaces of an op are equal, the result is the same. Otherwise it is interpolated linearly
    in the bytes that the op reads and writes, plus the share `MARGIN` of the larger workspace, and rounded up. If the
    workspaces differ although the op reads and writes equally many bytes at both measured sizes, the result is the
    larger workspace.

    Args:
        low: the measurements at the smaller size.
        high: the measurements at the larger size.
        traffic: the bytes that each op, then each inverse, reads and writes at the size between.

    Raises:
        ProblemError: an op's workspaces differ, but its entry of ``traffic`` is not between the measured ones.
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
