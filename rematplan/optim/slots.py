"""Spreading work: jobs over slots, so that no slot has much more than another."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TypeVar

Job = TypeVar("Job")


def longest_first(costs: Mapping[Job, float], slots: int) -> dict[Job, int]:
    """A slot for each job: the longest jobs first, each into the slot that has least so far.

    The fullest slot has at most 4/3 of the best possible (Graham 1969). Equal jobs keep the order of ``costs``.
    """
    loads = [(0.0, slot) for slot in range(slots)]
    found = {}
    for job in sorted(costs, key=lambda job: -costs[job]):
        load, slot = heapq.heappop(loads)
        found[job] = slot
        heapq.heappush(loads, (load + costs[job], slot))
    return found
