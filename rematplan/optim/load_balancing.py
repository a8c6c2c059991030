"""Divide jobs of known cost among a number of slots, evenly."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TypeVar

Job = TypeVar("Job")


def longest_first(costs: Mapping[Job, float], slots: int) -> dict[Job, int]:
    """Assign jobs to slots, numbered from 0, the longest first: the largest sum of costs in a slot is at most 4/3 of
    the smallest possible (Graham 1969). The result depends on ``costs`` and its order alone."""
    loads = [(0.0, slot) for slot in range(slots)]
    found = {}
    for job in sorted(costs, key=lambda job: -costs[job]):
        load, slot = heapq.heappop(loads)
        found[job] = slot
        heapq.heappush(loads, (load + costs[job], slot))
    return found
