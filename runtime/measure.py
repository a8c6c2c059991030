"""Real memory and real time of a call: allocator events on CPU, the allocator's own peak on CUDA."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")

Event = tuple[int, int]
"""Time in nanoseconds, bytes allocated (negative: freed)."""


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
    with memory_profile() as (events, _):
        results.append(call())
    return high_water([size for _, size in events]), results.pop()


def high_water(sizes: list[int]) -> int:
    """The largest running sum, at least 0."""
    held = peak = 0
    for size in sizes:
        held += size
        peak = max(peak, held)
    return peak


@contextmanager
def memory_profile() -> Iterator[tuple[list[Event], dict[str, tuple[int, int]]]]:
    """CPU allocator events of the block, and start and end of its `mark`s; both are filled at the end."""
    events: list[Event] = []
    marks: dict[str, tuple[int, int]] = {}
    with _quiet_profiler():
        recorder: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        recorder.__enter__()
    try:
        yield events, marks
    finally:
        with _quiet_profiler():
            recorder.__exit__(None, None, None)
        for event in recorder.profiler.kineto_results.events():
            name = event.name()
            if name == "[memory]":
                events.append((event.start_ns(), event.nbytes()))
            elif name.startswith(_MARK):
                start = event.start_ns()
                marks[name.removeprefix(_MARK)] = (start, start + event.duration_ns())
        events.sort(key=lambda event: event[0])


_MARK = "rematplan:"


def mark(name: str) -> Any:
    """Inside a `memory_profile`: a block whose time span is wanted."""
    return record_function(_MARK + name)


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
