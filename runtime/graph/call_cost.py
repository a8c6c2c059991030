"""What one call costs: time, workspace, real result sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallCost:
    """``time`` in microseconds; ``workspace`` in bytes held only while the call runs.

    ``results``: the real sizes of its results' storages, bytes, by position; 0 where unknown. Some kernels return a
    small tensor in a large storage, which the trace does not see. ``library``: bytes that a library keeps for good, for
    each thread that makes such a call.
    """

    time: float
    workspace: int = 0
    results: tuple[int, ...] = ()
    library: int = 0
