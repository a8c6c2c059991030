"""Divide jobs of known cost among a number of slots, evenly."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TypeVar

Job = TypeVar("Job")


def longest_first(costs: Mapping[Job, float], slots: int) -> dict[Job, int]:
    """Assign jobs to slots of about equal total cost: the longest job first, each to the slot with the least total so
    far.

    The total of the fullest slot is at most 4/3 of the smallest possible (Graham 1969). Jobs of equal cost are assigned
    in the order of ``costs``, so the result is the same in every process.

    Args:
        costs: the cost of each job.
        slots: the number of slots.

    Returns:
        The slot of each job, from 0 to ``slots`` − 1.
    """
    loads = [(0.0, slot) for slot in range(slots)]
    found = {}
    for job in sorted(costs, key=lambda job: -costs[job]):
        load, slot = heapq.heappop(loads)
        found[job] = slot
        heapq.heappush(loads, (load + costs[job], slot))
    return found
