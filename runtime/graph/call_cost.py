"""The cost of one call: its time, its workspace and the real sizes of its results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallCost:
    """The cost of one call of an op: its time, the bytes that it allocates while it runs, and what its results and
    libraries keep."""

    time: float
    """The time of one run, in microseconds."""
    workspace: int = 0
    """Bytes that are allocated only while the call runs."""
    results: tuple[int, ...] = ()
    """For each result, by position, the real bytes of its storage; 0 where unknown. Some kernels return a small tensor
    in a large storage, which tracing does not show."""
    library: int = 0
    """Bytes that a library allocates at the first such call in each thread and keeps, such as cuBLAS workspaces."""

    def to_row(self) -> tuple[float, int, tuple[int, ...], int]:
        """Return the fields as files have them; `astuple` would take 30 times as long, since it copies deeply."""
        return self.time, self.workspace, self.results, self.library

    @classmethod
    def from_row(cls, time: float, workspace: int, results: Iterable[int], library: int = 0) -> CallCost:
        """Return the cost with the fields of a file's row; `TypeError` or `ValueError` if one is no number."""
        return cls(float(time), int(workspace), tuple(map(int, results)), int(library))
