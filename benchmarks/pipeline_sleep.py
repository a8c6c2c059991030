"""The timeline's makespan against that of real gloo processes whose stages sleep, so that no core limits them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed import pipelining

from rematplan.pipeline.runnable_pipeline import TORCH_CLASSES
from rematplan.pipeline.schedules import ONE_STAGE, schedule_named
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.timeline import StageTimes, replay

RANKS, MICROBATCHES, WIDTH = 4, 8, 8
UNIT = 50_000.0
"""Microseconds of a rank's forward of one micro-batch, on average."""
UNEVEN = (0.7, 1.0, 1.3, 1.0)
"""The times of the stages relative to the mean, repeated."""
STEPS = 3
"""The number of steps whose shortest is the measured makespan, after one that is not timed. Other processes only add
time."""
CALIBRATED = ("1f1b", False)
"""The schedule, and whether its stages are uneven, from which the overhead of an action is found."""


class Sleep(torch.autograd.Function):
    """Sleeps in the forward and in the backward, and postpones the sleep of the gradients of weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: SleepingStage) -> torch.Tensor:
        """Sleep as long as the forward of ``stage``, and return a copy of ``x``."""
        ctx.stage = stage
        time.sleep(stage.times.forward / 1e6)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Sleep as long as the backward of the stage, and return a copy of ``gradient``."""
        time.sleep(ctx.stage.times.backward / 1e6)
        return gradient.clone(), None


class SleepingStage(nn.Module):
    """A stage whose forward and backward sleep as long as ``times`` states."""

    def __init__(self, times: StageTimes) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep, and return a tensor like ``x``."""
        return Sleep.apply(x * self.weight, self)  # type: ignore[no-any-return,no-untyped-call]

    def weights(self) -> Callable[[], None]:
        """Return the function that sleeps for the gradients of weights, as PyTorch's ``dw_builder``."""
        return lambda: time.sleep(self.times.weight / 1e6)


def times_of(schedule: PipelineSchedule, uneven: bool) -> list[StageTimes]:
    """Return the times of the stages: the backward for the input, and that for the weights, each take as long as the
    forward."""
    each = schedule.stages // schedule.ranks
    shares = [UNEVEN[s % len(UNEVEN)] if uneven else 1.0 for s in range(schedule.stages)]
    return [StageTimes(*([UNIT * share / each] * 3)) for share in shares]


def spans_of_steps(rank: int, name: str, uneven: bool) -> list[tuple[float, float]]:
    """Run the steps of a case as one rank. Return the start and end of each, in microseconds of a clock that all
    processes share."""
    schedule = schedule_named(name, RANKS, MICROBATCHES)
    times = times_of(schedule, uneven)
    meta = torch.empty(1, WIDTH, device="meta")
    made = []
    for stage in schedule.stage_of_rank[rank]:
        module = SleepingStage(times[stage])
        inputs = meta if stage == 0 else meta.clone().requires_grad_()
        made.append(
            pipelining.PipelineStage(
                module,
                stage,
                schedule.stages,
                torch.device("cpu"),
                input_args=(inputs,),
                output_args=(meta.clone().requires_grad_(),),
                dw_builder=module.weights,
            )
        )
    kind = getattr(pipelining, TORCH_CLASSES[name])
    stages = made[0] if name in ONE_STAGE else made
    run = kind(stages, n_microbatches=MICROBATCHES, loss_fn=lambda output, target: (output - target).sum())
    given = (torch.ones(MICROBATCHES, WIDTH),) if any(s.is_first for s in made) else ()
    more = {"target": torch.ones(MICROBATCHES, WIDTH)} if any(s.is_last for s in made) else {}
    spans = []
    for _ in range(STEPS + 1):
        distributed.barrier()
        began = time.monotonic()
        run.step(*given, **more)
        spans.append((1e6 * began, 1e6 * time.monotonic()))
    return spans


def worker(rank: int, rendezvous: str, cases: list[tuple[str, bool]], results: Any) -> None:
    """Run all cases as one process."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    for case in cases:
        results.put(spans_of_steps(rank, *case))


def simulated(name: str, uneven: bool, overhead: float) -> float:
    """Return the simulated makespan in microseconds, if each action takes ``overhead`` microseconds longer."""
    schedule = schedule_named(name, RANKS, MICROBATCHES)
    return replay(schedule, times_of(schedule, uneven), overhead=overhead).makespan


def calibrated(measured: float) -> float:
    """Return the overhead of an action in microseconds with which the case `CALIBRATED` takes as long as measured."""
    low, high = 0.0, UNIT
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if simulated(*CALIBRATED, middle) > measured else (middle, high)
    return low


def sleeping(quick: bool, _folder: Path | None) -> None:
    """Print for each schedule, with even and uneven stages, the measured makespan ÷ the simulated one.

    The overhead of an action is found from the first case. ``quick``: fewer schedules.
    """
    names = [CALIBRATED[0], *(n for n in TORCH_CLASSES if n != CALIBRATED[0])][: 2 if quick else None]
    cases = [(name, uneven) for name in names for uneven in (False, True)]
    overhead = 0.0
    with tempfile.TemporaryDirectory() as folder:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        started = multiprocessing.spawn(
            worker, (str(Path(folder, "rendezvous")), cases, results), RANKS, join=False
        )
        for case in cases:
            steps = zip(*(results.get() for _ in range(RANKS)), strict=True)
            measured = min(
                [max(end for _, end in step) - min(begin for begin, _ in step) for step in steps][1:]
            )
            overhead = overhead or calibrated(measured)
            plain = measured / simulated(*case, 0.0)
            print(
                f"{case[0]:14} {'uneven' if case[1] else 'even':6} stages: measured {measured / 1e3:7.1f} ms, ÷ "
                f"simulated {plain:.3f}, with {overhead / 1e3:.2f} ms an action "
                f"{measured / simulated(*case, overhead):.3f}",
                flush=True,
            )
        started.join()


if __name__ == "__main__":
    sleeping(False, None)
