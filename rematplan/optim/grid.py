"""The processes of a group as a grid: each row is a block of consecutive ranks, and columns cross the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import ProcessGroup

from rematplan.ir import ProcessEnded, UsageError

Result = TypeVar("Result")


class Grid:
    """The processes of a group as a grid: rows are blocks of consecutive ranks. Methods raise a ProcessEnded if another
    process is lost. UsageError if there is no process group, or ``columns_of``, the size of a column, does not divide
    it."""

    def __init__(self, group: ProcessGroup | None, columns_of: int) -> None:
        """Make process groups of this process's row and column; all processes must call this. ``group``: None for the
        default one."""
        if not distributed.is_initialized():
            raise UsageError(
                "there is no process group: call torch.distributed.init_process_group, or run under torchrun"
            )
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if columns_of < 1 or self.size % columns_of:
            raise UsageError(f"grad_workers is {columns_of}, which does not divide {self.size} processes")
        # The processes in a block, and this one's position in it.
        self.width = self.size // columns_of
        self.here = self.rank % self.width
        self.block = self.subgroup([range(b, b + self.width) for b in range(0, self.size, self.width)])
        self.column = self.subgroup([range(c, self.size, self.width) for c in range(self.width)])

    def subgroup(self, parts: Sequence[range]) -> ProcessGroup | None:
        """Create a process group for each range of ranks, in all processes, and return this process's, or None."""
        found: ProcessGroup | None = None
        for part in parts:
            made: Any = self.call(distributed.new_group, [self.everywhere(rank) for rank in part])
            found = made if self.rank in part else found
        return found

    def everywhere(self, rank: int) -> int:
        """Return the rank in the default process group of the process whose rank in this grid's group is ``rank``."""
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)

    def in_block(self, place: int) -> int:
        """Return the rank, in this grid's group, of the process at position ``place`` (from 0) in this process's block
        of consecutive ranks."""
        return self.rank - self.here + place

    def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function of `torch.distributed` and return its result.

        Raises:
            ProcessEnded: the call raised a RuntimeError, which torch does if another process cannot be reached.
        """
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise ProcessEnded(
                f"rank {self.rank} of {self.size}: another process has ended or cannot be reached ({reason})"
            ) from None
