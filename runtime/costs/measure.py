"""Measure the memory and the time of functions: memory with allocator events on a CPU, and with the caching allocator's
peak on CUDA."""

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
    """Run ``call`` and return the bytes that libraries keep allocated after its results are freed, such as cuBLAS's
    workspaces. Workspaces that exist already are freed first. On a CPU, return 0 without running ``call``.

    cuBLAS keeps a workspace for each pair of a thread (each has a cuBLAS handle) and a stream. On Hopper it has 32 MiB.
    """
    if device.type != "cuda":
        return 0
    release_libraries(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def peak_above_entry(call: Callable[[], T], device: torch.device) -> tuple[int, T]:
    """Run ``call``. Return the peak of the allocated bytes while it runs, minus the bytes that were allocated at its
    start; and the result of ``call``.

    On a CPU the peak is the largest running sum of the tensor allocator's events. It includes the workspaces of
    operators, but not memory that a library takes from the system directly. On CUDA it is the caching allocator's peak.
    """
    peak, _, result = peak_and_rest_above_entry(call, device)
    return peak, result


def peak_and_rest_above_entry(call: Callable[[], T], device: torch.device) -> tuple[int, int, T]:
    """Run ``call``. Return the peak of the allocated bytes while it runs and the bytes that are allocated at its end,
    both minus the bytes that were allocated at its start; and the result of ``call``, which keeps its bytes allocated.

    The bytes are those of `peak_above_entry`.
    """
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
    """Run ``call`` in a thread without a running profiler, and return its result.

    Measuring a peak needs a profiler, and a thread can have only one. If this thread is being profiled, ``call`` runs
    in another thread.
    """
    if not profiler_enabled():
        return call()
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result()


class _Record:
    """Collects the CPU allocator events of several threads during one measurement.

    ``events``: pairs of a time and a number of bytes (negative: freed). Times are in microseconds since the first
    recorded event of the thread that finished first.
    """

    def __init__(self) -> None:
        self.first: Any = None
        self.events: list[tuple[float, int]] = []

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Record the allocator events of the present thread inside the block.

        It uses PyTorch's legacy profiler: the newer one sees the memory of one thread only.
        """
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
    """Return a context manager for code in a further thread that does part of the work that `peak_above_entry`
    measures. The allocations inside the block are added to the measurement in progress. If there is none, the context
    manager does nothing."""
    return _watching[-1].thread() if _watching else nullcontext()


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Record the CPU allocator events inside the block.

    The list is filled when the block ends: the bytes of each event, in order of time; negative if memory was freed.
    Events in other threads are included if their code runs inside `watched`.
    """
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
    """Return the seconds that one call of ``call`` takes.

    On a CPU, one call is timed by the clock. On CUDA, `IN_A_ROW` calls in a row are timed by events on the stream, and
    the mean is returned, so that launching and waiting count no more than in a step.
    """
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
    """Return the seconds from the start of ``call`` until the device has finished its work. Earlier work of the device
    is finished first and does not count."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def interleaved_seconds(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5, settling: int = 0
) -> dict[str, float]:
    """Time several functions alternately in ``rounds`` rounds, and return the least seconds of each, by name. Noise
    only adds time, so the minimum is the best estimate.
    """
    return {name: min(times) for name, times in interleaved_rounds(calls, device, rounds, settling).items()}


def interleaved_rounds(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5, settling: int = 0
) -> dict[str, tuple[float, ...]]:
    """Time several functions alternately in ``rounds`` rounds, after one untimed call of each.

    Because they alternate, a slow period of the machine affects all functions alike.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(settling):
                call()
            times[name].append(wall_seconds(call, device))
    return {name: tuple(seconds) for name, seconds in times.items()}


def check_fits(needed: int, what: str) -> None:
    """Refuse an allocation that is larger than this machine's memory."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise ModelError(
            f"{what} take {show_bytes(needed)}, this machine has {show_bytes(present)} "
            "(a device model plans without allocating them: --costs a100)"
        )
