"""Dataflow of reversible stages in processes: measured peaks and errors of gradients.

    python benchmarks/dataflow.py [--quick]

RevViT, micro-batch 1, gloo processes on one machine. Each rank has its least budget. Peaks are bytes that the second
rank's tensors take above entry, without gradients. The checkpointed pipeline is PyTorch's 1F1B with each coupling pair
as a checkpoint. Errors are distances from the gradients that one process computes in float64.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed import ProcessGroup, pipelining
from torch.utils.checkpoint import checkpoint

import rematplan
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.models import build, example_inputs
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.pipeline.message_layout import turned
from rematplan.runtime.pipeline.stage_modules import stage_modules

PROCESSES = 8
SIZES = {"width": 96, "image": 112, "classes": 10}
CASES = [(4, 16, 2), (4, 4, 2), (4, 64, 2), (2, 16, 2), (8, 16, 2), (4, 16, 8)]
"""Ranks, micro-batches, couplings in a stage."""
QUICK = [(4, 4, 2), (2, 4, 2)]
CPU = torch.device("cpu")
TOKENS_LAST = (0, 2, 1)
"""The order of dimensions in a message between stages. The tokens are a tensor's second dimension, but its last one in
memory."""


def network(
    ranks: int, microbatches: int, each: int
) -> tuple[nn.Module, torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Return a reversible ViT, a batch, its targets, and cuts of the model into ``ranks`` stages of ``each`` coupling
    pairs."""
    depth = ranks * each
    torch.manual_seed(0)
    model = build("revvit_s", depth=depth, **SIZES)
    (x,) = example_inputs("revvit_s", seed=0, batch=microbatches, depth=depth, **SIZES)
    cuts = tuple(f"blocks.blocks.{each * k}" for k in range(1, ranks))
    return model, x, torch.arange(microbatches) % SIZES["classes"], cuts


def peak_of(step: Callable[[], object], module: nn.Module) -> int:
    """Return the peak of ``step`` in bytes above the bytes held at its start, without the gradients of ``module``."""
    peak, _ = peak_above_entry(step, CPU)
    return peak - sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)


def dataflow(rank: int, group: ProcessGroup, case: tuple[int, int, int]) -> dict[str, Any]:
    """Run a step of the dataflow pipeline (inverses recover inputs) as one rank, and return its measurements.

    ``case``: ranks, micro-batches, couplings per stage. The result has, by name: ``peak`` (bytes above entry),
    ``kept_promise`` (measured ÷ predicted peak), ``kept`` (bytes kept per micro-batch), ``message`` (bytes sent back),
    and ``squares``: squared distances of the pipeline's and of eager mode's gradients from float64's, and the squared
    norm of the latter.
    """
    model, x, y, cuts = network(*case)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    asked: dict[str, Any] = {"stages": case[0], "microbatches": case[1], "cuts": cuts, "schedule": "dataflow"}
    asked |= {"ranks": [rank], "strategy": "reversible", "loss_memory": "3x"}
    try:
        rematplan.plan_pipeline(model, (x,), budget=1, **asked)
    except InfeasibleBudget as refused:
        pipe = rematplan.plan_pipeline(model, (x,), budget=refused.smallest, **asked)
    (stage,) = stages = pipe.stages(group)
    schedule = pipe.schedule(stages, nn.functional.cross_entropy)
    data = (x,) if stage.is_first else ()
    target = {"target": y} if stage.is_last else {}
    peak = peak_of(lambda: schedule.step(*data, **target), stage.submod)
    states = sum(t.nbytes for t in (*stage.submod.parameters(), *stage.submod.buffers()))
    gradients = sum(p.grad.nbytes for p in stage.submod.parameters() if p.grad is not None)
    for other in (eager, exact):
        for one, its in zip(x.to(next(other.parameters()).dtype).split(1), y.split(1), strict=True):
            (nn.functional.cross_entropy(other(one), its) / case[1]).backward()
    names = [n for n, p in stage.submod.named_parameters() if p.grad is not None]
    true, plain, mine = (
        torch.cat([dict(m.named_parameters())[n].grad.double().flatten() for n in names])
        for m in (exact, eager, model)
    )
    return {
        "peak": peak,
        "kept_promise": (peak + states + gradients) / pipe.ranks[rank].peak,
        "kept": stage.kept,
        "message": sum(t.nbytes for t in stage.back),
        "squares": [float((one - true).square().sum()) for one in (mine, plain)]
        + [float(true.square().sum())],
    }


def checkpointed(rank: int, group: ProcessGroup, case: tuple[int, int, int]) -> dict[str, Any]:
    """Run a step of PyTorch's 1F1B as one rank, with each coupling pair of inner stages as a checkpoint; return its
    ``peak``.

    ``case``: ranks, micro-batches, couplings per stage. The peak is in bytes above entry, without gradients.
    """
    model, x, y, cuts = network(*case)
    wanted = stage_modules(model, (x[:1],), {}, cuts)[rank]
    each, first, last = case[2], rank == 0, rank == case[0] - 1
    blocks = model.blocks.blocks[each * rank : each * (rank + 1)]

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wanted.module if first or last else blocks

        def forward(self, *tensors: torch.Tensor) -> Any:
            if first or last:
                return self.inner(*tensors)
            inner = [turned(t, TOKENS_LAST) for t in tensors]  # as our first and last stages send them
            for block in self.inner:
                inner = checkpoint(block, *inner, use_reentrant=False)
            return tuple(turned(t, TOKENS_LAST) for t in inner)

    stage = pipelining.PipelineStage(
        Stage(), rank, case[0], CPU, input_args=wanted.inputs, output_args=wanted.outputs, group=group
    )
    schedule = pipelining.Schedule1F1B(stage, case[1], loss_fn=nn.functional.cross_entropy)
    data, target = ((x,) if first else ()), ({"target": y} if last else {})
    return {"peak": peak_of(lambda: schedule.step(*data, **target), stage.submod)}


def worker(rank: int, rendezvous: str, cases: list[tuple[int, int, int]], results: Any) -> None:
    """Run all cases as one process, and put (case, function's name, rank, measurements) into the queue ``results``."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=PROCESSES
    )
    groups = {ranks: distributed.new_group(list(range(ranks))) for ranks in sorted({c[0] for c in cases})}
    for case in cases:
        for task in (dataflow, checkpointed):
            if rank < case[0]:
                results.put((case, task.__name__, rank, task(rank, groups[case[0]], case)))
            distributed.barrier()


def main() -> None:
    """Run the cases in `PROCESSES` processes, and print a row for each case as soon as all its ranks have reported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    cases = QUICK if parser.parse_args().quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        started = multiprocessing.spawn(
            worker, (str(Path(folder, "rendezvous")), cases, results), PROCESSES, join=False
        )
        found: dict[Any, Any] = {}
        for _ in range(2 * sum(case[0] for case in cases)):
            while results.empty():
                started.join(0.1)  # raises an error if a process has ended with one
            case, task, rank, answer = results.get()
            found[case, task, rank] = answer
            if all((case, task, r) in found for task in ("dataflow", "checkpointed") for r in range(case[0])):
                show(case, found)
        started.join()


def show(case: tuple[int, int, int], found: dict[Any, Any]) -> None:
    """Print a row: peaks of dataflow and of checkpointing on the second rank, and errors of gradients over all ranks.

    ``found``: the measurements, by case, function's name and rank.
    """
    inner = min(1, case[0] - 1)
    mine, theirs = found[case, "dataflow", inner], found[case, "checkpointed", inner]
    sums = [sum(found[case, "dataflow", r]["squares"][k] for r in range(case[0])) for k in range(3)]
    ours, plain = (math.sqrt(one / sums[2]) for one in sums[:2])
    print(
        f"P {case[0]} M {case[1]:2} couplings {case[2]}: dataflow {show_bytes(mine['peak']):>10} (with states "
        f"{mine['kept_promise']:.3f} of the promise; K {mine['kept']}; message {show_bytes(mine['message'])})  "
        f"checkpoint {show_bytes(theirs['peak']):>10}, ratio {mine['peak'] / theirs['peak']:.2f}; gradients "
        f"{ours:.1e}, eager {plain:.1e}, {ours / plain:.2f} times",
        flush=True,
    )


if __name__ == "__main__":
    main()
