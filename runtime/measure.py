"""Real memory and real time of a call: allocator events on CPU, the allocator's own peak on CUDA."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue, where it has one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    results: list[T] = []
    with _allocations() as sizes:
        results.append(call())
    return max(0, *accumulate(sizes)) if sizes else 0, results.pop()


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """CPU allocator events of the block in order, in bytes (negative: freed); filled at the end."""
    events: list[int] = []
    with _quiet_profiler():
        recorder: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        recorder.__enter__()
    try:
        yield events
    finally:
        with _quiet_profiler():
            recorder.__exit__(None, None, None)
        found = [e for e in recorder.profiler.kineto_results.events() if e.name() == "[memory]"]
        events += [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library writes a line of its own to standard error; keep it from the user."""
    sys.stderr.flush()
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


def seconds_in_turn(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5
) -> dict[str, float]:
    """The least time of each call over ``rounds``, the calls taken in turn after one warm-up each.

    In turn, so that a machine's slow spell hits all alike; the least, since noise only adds.
    """
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            best[name] = min(best[name], time.perf_counter() - start)
    return best
