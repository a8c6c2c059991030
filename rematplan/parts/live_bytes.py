"""`LiveBytes`: the bytes of the tensors that code has made and that still exist."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.compat import TorchDispatchMode, profiler_enabled, pytree
from rematplan.runtime.graph.tensor_storages import storages_in

_CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts, inside of a ``with`` statement, the storages that ATen ops return until they are freed, except those
    of ``known``, and what ops need while they run."""

    supports_higher_order_operators = True  # one that takes functions counts as one op

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._largest = 0
        self._paused = False
        self._counted = {*storages_in([*known])}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and, unless paused, count the storages that it returns. ``peak`` rises to the bytes before it plus
        those that it needed, which are not measured while a profiler runs."""
        del types
        args, kwargs = pytree.tree_map_only(torch.Tensor, _with_memory, (args, kwargs or {}))
        call = partial(func, *args, **kwargs)
        if self._paused:
            return call()
        before = self.live
        if profiler_enabled():  # a second one cannot measure
            result, during = call(), self._largest
            self.count(result)
            before = self.live
        else:
            given = pytree.tree_leaves((args, kwargs))
            device = next((one.device for one in given if isinstance(one, torch.Tensor)), _CPU)
            during, result = peak_above_entry(call, device)
            self.count(result)
        self.peak = max(self.peak, before + during)
        return result

    def count(self, tensors: Any) -> None:
        """Count the storages of a pytree's tensors, unless they are counted already, until they are freed."""
        for key, storage in storages_in(tensors).items():
            if key not in self._counted:
                bytes_ = allocated(storage.nbytes(), storage.device)
                self._counted.add(key)
                self.live += bytes_
                self.peak, self._largest = max(self.peak, self.live), max(self._largest, bytes_)
                weakref.finalize(storage, self._freed, key, bytes_).atexit = False

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Never count a tensor's storage."""
        for key, storage in storages_in(tensor).items():
            self._counted.add(key)
            weakref.finalize(storage, self._counted.discard, key).atexit = False

    def peak_since(self) -> int:
        """Return the most bytes at one time since the last call of this method."""
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


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or zeros in place of one without memory, which kernels read below a dispatch mode."""
    if not tensor._is_zerotensor():
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def allocated_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the allocator gives to the storages of tensors, each once, also inside of subclasses."""
    return sum(allocated(one.nbytes(), one.device) for one in storages_in([*tensors]).values())
