"""Real memory and real time of a call: allocator events on CPU, the allocator's own peak on CUDA."""

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
    """Wait for the device's queue, where it has one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_libraries(device: torch.device) -> None:
    """Give back what libraries keep on the device; they take it again when they need it."""
    if device.type == "cuda":
        from rematplan.runtime.graph.compat import clear_cublas_workspaces  # not in a build for CPUs

        torch.cuda.synchronize(device)
        clear_cublas_workspaces()


def kept_by_libraries(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that stay allocated when ``call`` has run for the first time and its results are gone; 0 on a CPU.

    cuBLAS has a workspace for each thread (its handle) and stream that it meets, 32 MiB on Hopper, and keeps it.
    """
    if device.type != "cuda":
        call()
        return 0
    release_libraries(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def peak_above_entry(call: Callable[[], T], device: torch.device) -> tuple[int, T]:
    """Bytes that ``call`` holds at its worst moment beyond what was held when it began, and its result.

    CPU: the running sum of the tensor allocator's events, which sees every operator's workspace but not what
    a library takes from the system by itself. CUDA: the caching allocator's peak of allocated bytes.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, result
    with _allocations() as sizes:
        result = call()
    return max(0, *accumulate(sizes)) if sizes else 0, result


def unprofiled(call: Callable[[], T]) -> T:
    """What ``call`` gives; run in a thread of its own where somebody profiles this one, since a thread has one
    profiler, and a peak is measured by another."""
    if not profiler_enabled():
        return call()
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result()


class _Record:
    """Allocator events of the threads that are being watched, each with the time after the first thread's start."""

    def __init__(self) -> None:
        self.first: Any = None
        self.events: list[tuple[float, int]] = []

    @contextmanager
    def thread(self) -> Iterator[None]:
        """A block of the present thread. PyTorch's newer profiler sees one thread's memory only."""
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
    """For a block of a further thread that does a part of the work: what it allocates is seen, if that is measured."""
    return _watching[-1].thread() if _watching else nullcontext()


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """CPU allocator events of the block in order, in bytes (negative: freed); filled at the end."""
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


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The time of one call: on a CPU by the clock; on CUDA by the stream, of `IN_A_ROW` in a row, so that starting one
    and waiting for its end count no more than in a step."""
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


def seconds_in_turn(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5, settling: int = 0
) -> dict[str, float]:
    """The least time of each call over ``rounds`` of `rounds_in_turn`: the least, since noise only adds."""
    return {name: min(times) for name, times in rounds_in_turn(calls, device, rounds, settling).items()}


def rounds_in_turn(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5, settling: int = 0
) -> dict[str, tuple[float, ...]]:
    """The seconds of each call in each round, the calls taken in turn after one warm-up each.

    In turn, so that a slow spell of the machine affects all calls alike. ``settling``: untimed repeats before each
    timed call, so that the allocator is as this call leaves it, not as the call before did.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(settling):
                call()
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times[name].append(time.perf_counter() - start)
    return {name: tuple(seconds) for name, seconds in times.items()}


def check_fits(needed: int, what: str) -> None:
    """Refuse ``needed`` bytes that are more than this machine has.

    Raises:
        ModelError: with both figures.
    """
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise ModelError(
            f"{what} take {show_bytes(needed)}, this machine has {show_bytes(present)} "
            "(a device model plans without making them: --device-model a100)"
        )
