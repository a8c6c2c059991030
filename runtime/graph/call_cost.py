"""The cost of one call: its time, its workspace and the real sizes of its results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallCost:
    """The cost of one call of an op.

    ``time``: microseconds. ``workspace``: bytes that are allocated only while the call runs. ``results``: for each
    result, by position, the real bytes of its storage; 0 where unknown. (Some kernels return a small tensor in a large
    storage, which tracing does not show.) ``library``: bytes that a library allocates at the first call of this kind
    in each thread and never frees (cuBLAS workspaces, for example).
    """

    time: float
    workspace: int = 0
    results: tuple[int, ...] = ()
    library: int = 0
