"""Measure how much two lanes (threads on the CPU, streams on CUDA) slow each other down on the present device, with
ops of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from rematplan.planner.core.lane_schedule import Placed, Sharing
from rematplan.runtime.costs.measure import wall_seconds
from rematplan.runtime.costs.synthetic_arguments import SyntheticArguments
from rematplan.runtime.execute.lanes import two_lanes
from rematplan.runtime.graph.captured_step import CapturedStep

SECONDS = 0.02
"""The duration for which each lane is kept busy in one measurement."""
ROUNDS = 5
"""The number of measurements, of which the shortest counts."""
HANDOVERS = 50
"""How often each lane waits for the other lane in one measurement of waits."""


def measured_sharing(
    step: CapturedStep, runs: Sequence[str], where: Placed, cost: Mapping[str, float]
) -> Sharing:
    """Measure how two lanes share the step's device: run the op of the largest total ``cost`` of each lane, alone and
    together. The result's times are microseconds, its speed is 0.5 to 1. ``runs``: the ops that a plan runs; ``where``:
    their lanes. If a lane has no runs, return `Sharing()`."""
    if not where.main or not where.recovery:
        return Sharing()
    device = step.device
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        lanes = [_busy(step, [runs[at] for at in lane], cost) for lane in where.lanes]
        alone, together, start, handover = [], [], [], []
        for _ in range(ROUNDS):
            alone.append(wall_seconds(lanes[0], device) + wall_seconds(lanes[1], device))
            together.append(wall_seconds(lambda: _both(device, *lanes), device))
            start.append(wall_seconds(lambda: _both(device, _nothing, _nothing), device))
            handover.append(wall_seconds(lambda: _hand_over(device), device))
    # Ops that take 20 ms each on their own, and 25 ms together, run at 40 / 2 / 25 = 0.8 of their speed.
    speed = min(alone) / 2 / min(together)
    waiting = max(0.0, min(handover) - min(start)) / (2 * HANDOVERS)
    return Sharing(min(1.0, max(0.5, speed)), waiting * 1e6, min(start) * 1e6)


def _busy(step: CapturedStep, names: Sequence[str], cost: Mapping[str, float]) -> Callable[[], None]:
    """Return a function that runs, for about `SECONDS` seconds, the call among ``names`` with the largest total
    ``cost``, collectives excluded. It does nothing if there is no such call."""
    total: dict[str, float] = {}
    for name in (n for n in names if n in step.call and not step.call[n].collective):  # the loss is no call
        total[name] = total.get(name, 0.0) + cost[name]
    if not total:
        return _nothing
    name = max(total, key=lambda one: total[one])
    call = step.call[name]
    args, kwargs = SyntheticArguments(step).of(call)

    def once() -> None:
        call.target(*args, **kwargs)

    once()  # the first run of an op is slower
    times = math.ceil(SECONDS / max(min(wall_seconds(once, step.device) for _ in range(ROUNDS)), 1e-6))

    def run() -> None:
        for _ in range(times):
            once()

    return run


def _both(device: torch.device, on_main: Callable[[], None], on_recovery: Callable[[], None]) -> None:
    _, recovery = two_lanes(device)
    with recovery.running(on_recovery):
        on_main()


def _hand_over(device: torch.device) -> None:
    """Run two lanes that compute nothing and wait for each other `HANDOVERS` times, to measure a wait."""
    main, recovery = two_lanes(device)

    def answer() -> None:
        for k in range(HANDOVERS):
            main.wait(k + 1)
            recovery.reached(k + 1)

    with recovery.running(answer):
        for k in range(HANDOVERS):
            main.reached(k + 1)
            recovery.wait(k + 1)


def _nothing() -> None:
    pass
