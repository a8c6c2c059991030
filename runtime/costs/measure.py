"""Measure memory and time of functions: memory by allocator events on a CPU, by the allocator's peak on CUDA."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, TypeVar

import torch

from rematplan.ir.errors import ModelError, show_bytes
from rematplan.runtime.graph.compat import (
    ExperimentalConfig,
    ProfilerConfig,
    ProfilerState,
    disable_profiler_legacy,
    enable_profiler_legacy,
    profiler_enabled,
    pytree,
)

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished all its work. On a CPU nothing happens."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_libraries(device: torch.device) -> None:
    """Free the workspaces that cuBLAS keeps on a CUDA device; cuBLAS allocates them again when needed. On a CPU
    nothing happens."""
    if device.type == "cuda":
        from rematplan.runtime.graph.compat import clear_cublas_workspaces  # missing in CPU builds

        torch.cuda.synchronize(device)
        clear_cublas_workspaces()


def kept_by_libraries(call: Callable[[], object], device: torch.device) -> int:
    """Run ``call`` on CUDA, after cuBLAS's workspaces were freed, and return the bytes that libraries keep afterwards.
    On a CPU return 0 and run nothing."""
    if device.type != "cuda":
        return 0
    # cuBLAS keeps a workspace for each pair of a thread and a stream, on Hopper 32 MiB. Those that exist are
    # freed first.
    release_libraries(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def peak_above_entry(call: Callable[[], T], device: torch.device) -> tuple[int, T]:
    """Run ``call``. Return the peak of allocated bytes above those at its start, and its result."""
    # On a CPU, memory that a library takes from the system directly is not included.
    peak, _, result = peak_and_rest_above_entry(call, device)
    return peak, result


def peak_and_rest_above_entry(call: Callable[[], T], device: torch.device) -> tuple[int, int, T]:
    """Run ``call``. Return its peak of allocated bytes and the allocated bytes at its end, each less those at its
    start, and its result. The second number is negative if more was freed than allocated."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        peak, rest = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return peak - before, rest - before, result
    with _allocations() as sizes:
        result = call()
    return max(0, *accumulate(sizes)) if sizes else 0, sum(sizes), result


def unprofiled(call: Callable[[], T]) -> T:
    """Run ``call`` in a thread without a running profiler and return its result. Measuring a peak needs the thread's
    one profiler."""
    if not profiler_enabled():
        return call()
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result()


class _Record:
    """Collects the CPU allocator events of several threads during one measurement. ``events``: pairs of a time, in
    microseconds since a first event, and bytes, negative if freed."""

    def __init__(self) -> None:
        self.first: Any = None
        self.events: list[tuple[float, int]] = []

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Append this thread's CPU allocations and frees in the block to ``events``, when the block ends. PyTorch's
        legacy profiler can run in several threads at once, its newer one cannot."""
        settings = (False, True, False, False, False, ExperimentalConfig())
        enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *settings))
        try:
            yield
        finally:
            found = [e for events in disable_profiler_legacy() for e in events]
            self.first = self.first or found[0]
            memory = (e for e in found if str(e.kind()) == "memory_alloc")
            self.events += [(self.first.cpu_elapsed_us(e), e.cpu_memory_usage()) for e in memory]


_watching: list[_Record] = []


def watched() -> AbstractContextManager[None]:
    """Return a context that adds a further thread's allocations to the measurement in progress, if there is one."""
    return _watching[-1].thread() if _watching else nullcontext()


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Record the CPU allocator events inside the block, also of other threads in `watched`. The list gets its entries
    when the block ends: bytes in order of time, negative if freed."""
    sizes: list[int] = []
    record = _Record()
    _watching.append(record)
    try:
        with record.thread():
            yield sizes
    finally:
        _watching.remove(record)
        sizes += [size for _, size in sorted(record.events, key=lambda event: event[0])]


IN_A_ROW = 5
"""The number of calls that are timed together on CUDA."""


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: by the clock on a CPU, as the mean of `IN_A_ROW` calls by events on CUDA."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(IN_A_ROW):
            call()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / IN_A_ROW


def wall_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from the start of ``call`` until the device has finished it, without earlier work."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def interleaved_seconds(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5, settling: int = 0
) -> dict[str, float]:
    """Time functions alternately in ``rounds`` rounds and return the least seconds of each: noise only adds time."""
    return {name: min(times) for name, times in interleaved_rounds(calls, device, rounds, settling).items()}


def interleaved_rounds(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5, settling: int = 0
) -> dict[str, tuple[float, ...]]:
    """Time functions alternately, so that slow periods affect all alike, and return the seconds of each round by name.
    Each function is called once untimed at first, and ``settling`` times untimed before each timed call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(settling):
                call()
            times[name].append(wall_seconds(call, device))
    return {name: tuple(seconds) for name, seconds in times.items()}


def bytes_of(held: object) -> int:
    """Return the bytes of the tensors in nested containers. A storage that several share counts once."""
    storages = [t.untyped_storage() for t in pytree.tree_leaves(held) if isinstance(t, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def physical_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_fits(needed: int, what: str) -> None:
    """Raise `ModelError` for an allocation that is larger than this machine's memory."""
    present = physical_memory()
    if needed > present:
        raise ModelError(
            f"{what} take {show_bytes(needed)}, this machine has {show_bytes(present)} "
            "(a device model plans without allocating them: --costs a100)"
        )
