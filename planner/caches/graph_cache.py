"""Cache values that are computed from a problem, for as long as the problem object exists."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TypeVar

from rematplan.ir import TrainingGraph

Value = TypeVar("Value")

_kept: dict[int, dict[Hashable, object]] = {}


def cached_on(graph: TrainingGraph, key: Hashable, work: Callable[[], Value]) -> Value:
    """Return ``work()``, computed once for this graph object and ``key`` and kept while the graph exists.

    The result must not reference the graph, or neither is ever freed.
    """
    # By identity: hashing thousands of ops would take longer than most results.
    row = _kept.get(id(graph))
    if row is None:
        row = _kept[id(graph)] = {}
        weakref.finalize(graph, _kept.pop, id(graph), None)
    if key not in row:
        row[key] = work()
    return row[key]  # type: ignore[return-value]
