"""`LiveBytes`: the bytes of the tensors that code has made and that still exist."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rematplan.runtime.costs.optimizer_memory import plain_tensors
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.compat import TorchDispatchMode, pytree


class LiveBytes(TorchDispatchMode):
    """Counts, inside of a ``with`` statement, the storages that ATen ops return until they are freed, except those
    of ``known``."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.largest = 0
        """The bytes of the largest storage that was counted."""
        self._paused = False
        self._counted = {_key(storage) for one in known for storage in _storages(one)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self.count(result)
        return result

    def count(self, tensors: Any) -> None:
        """Count the storages of a pytree's tensors, unless they are counted already, until they are freed."""
        for one in pytree.tree_leaves(tensors):
            for storage in _storages(one) if isinstance(one, torch.Tensor) else ():
                if (key := _key(storage)) not in self._counted:
                    bytes_ = allocated(storage.nbytes(), storage.device)
                    self._counted.add(key)
                    self.live += bytes_
                    self.peak, self.largest = max(self.peak, self.live), max(self.largest, bytes_)
                    weakref.finalize(storage, self._freed, key, bytes_).atexit = False

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Never count a tensor's storage."""
        for storage in _storages(tensor):
            self._counted.add(key := _key(storage))
            weakref.finalize(storage, self._counted.discard, key).atexit = False

    def peak_since(self) -> int:
        """Return the largest sum since the last call of this method."""
        peak, self.peak = self.peak, self.live
        return peak

    def _freed(self, key: int, bytes_: int) -> None:
        self._counted.discard(key)
        self.live -= bytes_

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is made inside of the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    return [one.untyped_storage() for one in plain_tensors(tensor)]


def _key(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)
