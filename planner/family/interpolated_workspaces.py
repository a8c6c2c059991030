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
"""What is added to a workspace between two measured ones that differ, as a share of the larger one."""


@dataclass(frozen=True, eq=False)
class Workspaces:
    """What the ops, then the inverses, of a problem read and write, and their measured workspaces; in bytes."""

    traffic: Ints
    bytes: Ints


def workspaces_of(graph: TrainingGraph) -> Workspaces:
    """Return the workspaces of a problem whose ops were measured."""
    recipes = (*graph.ops, *graph.inverses)
    return Workspaces(traffic_of(graph), np.array([op.workspace for op in recipes], dtype=np.int64))


def traffic_of(graph: TrainingGraph) -> Ints:
    """Return the bytes that each op, then each inverse, reads and writes."""
    size = graph.size
    recipes = (*graph.ops, *graph.inverses)
    return np.array([sum(size[t] for t in (*op.reads, *op.writes)) for op in recipes], dtype=np.int64)


def workspaces_between(low: Workspaces, high: Workspaces, traffic: Ints) -> Ints:
    """Return the workspaces of ops that read and write ``traffic`` bytes, from two measurements.

    Where both measurements are equal, so is the result. Otherwise it is on the line through both, rounded up, plus
    `MARGIN` of the larger one. An op whose traffic does not vary is charged the larger one.

    Raises:
        ProblemError: an op's traffic is not between the measured ones, though its workspaces differ.
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
