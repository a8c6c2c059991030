"""Training on random lengths: how long a new shape waits before its step, whether peaks stay within the budget, and
the time of the whole loop, against eager mode and PyTorch's own methods of saving memory.

Each network is planned for its largest size, at a share of that size's peak, and then trained on random sizes. After
each step gradients and buffers are compared with eager mode's bit by bit, in the same loop. The waiting time of a
step is that of `prepare` for its batch: ``known member`` where the plan's source was compiled before, ``new member``
where it was compiled for this step, ``planned`` where a plan had to be searched or a step to be made. Times are CPU
seconds, so that a busy machine does not count: of the calling thread for the waiting, of this process for the loops.
The process that refines plans is not in them. A loop's ratio to eager mode is also shown without the waiting, and
divided by what the plans in use predict: eager mode's time of each step plus the overhead of the step's plan.

With ``--ranges``, the range of sizes is stated when the network is planned (`dynamic_shapes`), so that the capture with
open sizes is made then and not in the loop. With ``--kernels fused``, whose results differ by rounding, all steps
differ from eager mode's.

Rivals, on the same batches: `torch.utils.checkpoint` for each block; ``torch.compile(dynamic=True)`` with
``activation_memory_budget``, the min-cut partitioner and no compiler of kernels, whose compilation is in its loop.

With ``--lengths``, no rivals: a small model is trained on that many random lengths, and every tenth of them the
resident memory and the numbers of what is kept are printed.

usage: python benchmarks/shapes.py [NAME ...] [--steps 100] [--budget 70%] [--seed 0] [--activation-budget 0.3]
                                   [--ranges] [--alone] [--kernels fused]
       python benchmarks/shapes.py --lengths 1000
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import rematplan
from rematplan.ir import show_bytes
from rematplan.models import build
from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")
VOCABULARY = 1000
KINDS = ("captured", "planned", "new member", "known member", "known shape")
"""Kinds of waits before a step."""
EAGER, PLANNED = "eager", "planned"
CHECKPOINTED, COMPILED = "checkpoint for each block", "torch.compile, activation budget"
"""Names of methods."""
RIVALS = 10
"""Of the rivals' steps, every tenth has its peak measured."""


@dataclass(frozen=True)
class Case:
    """A network, and batches of it. ``make``: builds the network for sizes up to ``largest``. ``batch``: of a size.
    ``least``, ``step``: sizes are ``least``, ``least + step`` and so on. ``block``: the name of the class of the
    modules that are checkpointed."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    least: int
    largest: int
    block: str
    step: int = 1


def _tokens(length: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (4, length)),)


def _masked(length: int) -> tuple[Tensor, ...]:
    mask = torch.ones(4, length, dtype=torch.long)
    mask[0, -max(1, length // 8) :] = 0
    return *_tokens(length), mask


def _images(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, size, size),)


class Scores(nn.Module):
    """A language model of the library ``transformers`` that returns only its scores, as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return scores (N, T, vocabulary) for token numbers (N, T). ``mask``: the attention mask, or None."""
        found: Tensor = self.model(input_ids=tokens, attention_mask=mask, use_cache=False, return_dict=False)[
            0
        ]
        return found


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    return Scores(BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes)))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 384}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)
    return Scores(LlamaForCausalLM(config))


def _gpt() -> nn.Module:
    return build("gpt12", depth=6, width=128, vocabulary=VOCABULARY, tokens=256)


CASES: Mapping[str, Case] = {
    "bert": Case(_bert, _masked, 32, 256, "BertLayer"),
    "gpt": Case(_gpt, _tokens, 32, 256, "Block"),
    "llama": Case(_llama, _tokens, 32, 256, "LlamaDecoderLayer"),
    "unet": Case(lambda: build("unet", width=8), _images, 32, 160, "Sequential", 16),
}


@dataclass
class Loop:
    """What one model's loop has shown. ``seconds``: of all steps, compilation included. ``peaks``: bytes, with
    parameters, buffers and batch. ``different``: the number of steps that differ from eager mode's in some bit.
    ``error``: why the loop ended early; empty if it did not. ``last``: seconds of the last step."""

    model: nn.Module
    seconds: float = 0.0
    peaks: list[int] = field(default_factory=list)
    different: int = 0
    error: str = ""
    last: float = 0.0


@dataclass
class Result:
    """What a benchmark has shown. ``loops``: by the name of the method; the first is eager mode. ``waits``: seconds
    before a step, by kind. ``first``: seconds until the network was planned for its largest size. ``budget``: bytes.
    ``predicted``: seconds of the planned loop without waiting, as eager mode's times and the plans' overheads predict.
    """

    loops: dict[str, Loop]
    first: float = 0.0
    budget: int = 0
    predicted: float = 0.0
    waits: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


def _step(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    """Run forward, a mean square loss, and backward. Gradients are None at the beginning."""
    for parameter in model.parameters():
        parameter.grad = None
    model(*batch).square().mean().backward()


def _seconds(call: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    began = clock()
    call()
    return clock() - began


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def _checkpointed(model: nn.Module, block: str) -> nn.Module:
    """Put every block under `torch.utils.checkpoint`."""
    for one in [m for m in model.modules() if type(m).__name__ == block]:
        one.forward = partial(checkpoint, one.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def _compiled(model: nn.Module) -> nn.Module:
    """Return the model under ``torch.compile(dynamic=True)``, without a compiler of kernels. Batch norm is decomposed,
    because its backward reads statistics that the forward has changed, which AOTAutograd refuses."""
    aten = torch.ops.aten
    backend = aot_autograd(
        decompositions=get_decompositions(
            [aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward]
        ),
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    return torch.compile(model, backend=backend, dynamic=True)  # type: ignore[return-value]


def _ranges(model: nn.Module, case: Case) -> dict[str, dict[int, Dim]]:
    """Return the sizes of the dimensions of the batch that vary, as for `plan_module`."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    varying = case.step * Dim("size", min=-(-case.least // case.step), max=case.largest // case.step)
    return {
        name: {dim: varying for dim, size in enumerate(low.shape) if size == case.least}
        for name, low in zip(names, case.batch(case.least), strict=False)
    }


def train(
    case: Case, steps: int, budget: str, seed: int, ranges: bool, rivals: bool, kernels: str
) -> tuple[Result, rematplan.PlanningStats]:
    """Train one network on ``steps`` batches of random size, next to a copy in eager mode.

    Return the measurements, the planning statistics, and the budget in bytes.
    """
    torch.manual_seed(seed)
    model, sizes = case.make().train(), random.Random(seed)
    copies = [copy.deepcopy(model) for _ in range(3)]
    began = time.process_time()
    shapes = _ranges(model, case) if ranges else None
    planned = rematplan.plan_module(
        model, case.batch(case.largest), budget=budget, dynamic_shapes=shapes, kernels=kernels
    )
    first = time.process_time() - began
    others = {CHECKPOINTED: _checkpointed(copies[1], case.block), COMPILED: _compiled(copies[2])}
    trained = {EAGER: copies[0], PLANNED: planned, **(others if rivals else {})}
    loops = {name: Loop(one) for name, one in trained.items()}
    result = Result(loops, first, planned.plan.budget or planned.plan.peak)
    for at in range(steps):
        size = sizes.randrange(case.least, case.largest + 1, case.step)
        batch = case.batch(size)
        before = rematplan.planning(planned).stats()
        wait = _seconds(lambda batch=batch: planned.prepare(*batch), time.thread_time)  # type: ignore[misc]
        result.waits[_kind(before, rematplan.planning(planned).stats())].append(wait)
        for name, loop in loops.items():
            _train_once(loop, loops[EAGER].model, batch, at)
            if name == EAGER:
                result.predicted += loop.last * (1 + planned.plan.estimate.overhead)
        for name, loop in loops.items():
            if not loop.error and (name in (EAGER, PLANNED) or at % RIVALS == 0):
                loop.peaks.append(_peak(loop.model, batch))
    return result, rematplan.planning(planned).stats()


def _train_once(loop: Loop, eager: nn.Module, batch: tuple[Tensor, ...], seed: int) -> None:
    """Train a loop's model on a batch, and compare it with the model in eager mode, which was trained on it before."""
    if loop.error:
        return
    torch.manual_seed(seed)
    try:
        loop.last = _seconds(lambda: _step(loop.model, batch))
    except RuntimeError as error:
        loop.error = str(error).splitlines()[0]
        return
    loop.seconds += loop.last
    pairs = [(a.grad, b.grad) for a, b in zip(eager.parameters(), loop.model.parameters(), strict=True)]
    pairs += zip(eager.buffers(), loop.model.buffers(), strict=True)
    loop.different += any(_differ(a, b) for a, b in pairs)


def _kind(before: rematplan.PlanningStats, after: rematplan.PlanningStats) -> str:
    """Return the kind of a wait, an entry of `KINDS`."""
    if after.captures > before.captures or after.open_captures > before.open_captures:
        return "captured"
    if after.instances - before.instances > after.carried - before.carried:
        return "planned"
    new = after.sources > before.sources
    return ("new member" if new else "known member") if after.carried > before.carried else "known shape"


def _peak(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """Return the peak of a step, with parameters, buffers and batch; gradients begin and end as None, and buffers are
    restored."""
    for parameter in model.parameters():
        parameter.grad = None
    before = [buffer.clone() for buffer in model.buffers()]
    peak = peak_above_entry(lambda: _step(model, batch), CPU)[0]
    for parameter in model.parameters():
        parameter.grad = None
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    return peak + sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *batch))


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b))


def show(name: str, result: Result, stats: rematplan.PlanningStats) -> None:
    """Print what a benchmark has shown."""
    waits = ", ".join(
        f"{len(ms)} {kind} {statistics.median(ms):.1f} (to {max(ms):.1f})"
        for kind, every in result.waits.items()
        if (ms := [1e3 * wait for wait in every])
    )
    print(
        f"{name}: budget {show_bytes(result.budget)}; first plan {result.first:.1f} s; ms before a step, median "
        f"(largest): {waits}; captures {stats.captures}, with open sizes {stats.open_captures}, instances "
        f"{stats.instances}, carried {stats.carried}, sources {stats.sources}, exchanged {stats.swaps}"
        + "".join(f"; {reason}" for reason in stats.reasons)
    )
    eager, waited = result.loops[EAGER], sum(map(sum, result.waits.values()))
    steps = result.loops[PLANNED].seconds
    result.loops[PLANNED].seconds += waited
    print(
        f"  waiting {waited:.2f} s; without it {steps / eager.seconds:.3f} of eager's time and "
        f"{steps / result.predicted:.3f} of the predicted time; with it {(steps + waited) / result.predicted:.3f}"
    )
    for method, loop in result.loops.items():
        print(
            f"  {method:34} loop {loop.seconds / eager.seconds:5.2f} of eager's {eager.seconds:.1f} s, peak "
            f"{max(loop.peaks, default=0) / result.budget:.3f} of the budget, {loop.different} steps differ"
            + f"; ended early: {loop.error}"
            * bool(loop.error),
            flush=True,
        )


def many(lengths: int, budget: str, seed: int) -> None:
    """Train a small GPT on many random lengths, and print every tenth of them what it keeps."""
    torch.manual_seed(seed)
    model, sizes = build("gpt12", depth=2, width=32, vocabulary=100, tokens=2048).train(), random.Random(seed)
    planned = rematplan.plan_module(model, (torch.randint(0, 100, (2, 1100)),), budget=budget)
    print(f"{'lengths':>8} {'resident':>12} {'ms':>6}  plans families sources searching")
    waits: list[float] = []
    for at in range(1, lengths + 1):
        batch = (torch.randint(0, 100, (2, sizes.randrange(32, 1100))),)
        waits.append(_seconds(lambda batch=batch: planned.prepare(*batch), time.thread_time))  # type: ignore[misc]
        _step(planned, batch)
        if at % max(1, lengths // 10) == 0:
            gc.collect()
            stats, runner = rematplan.planning(planned).stats(), planned._rematplan  # type: ignore[attr-defined]
            shown = f"{1e3 * statistics.median(waits):6.1f}"
            kept = f"{stats.plans} {len(runner.planner.store._families)} {stats.sources} {stats.searching}"
            print(
                f"{at:8} {show_bytes(_resident()):>12} {shown}  {kept}; carried {stats.carried}", flush=True
            )
            waits.clear()


def main() -> None:
    """Print what the benchmark shows of each network."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--activation-budget", type=float, default=0.3, help="of torch.compile: 0 to 1")
    parser.add_argument("--lengths", type=int, default=0, help="only train a small model on so many lengths")
    parser.add_argument("--ranges", action="store_true", help="state the range of sizes when planning")
    parser.add_argument("--alone", action="store_true", help="no rivals except eager mode")
    parser.add_argument("--kernels", default="eager", help="eager or fused")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if asked.lengths:
        many(asked.lengths, asked.budget, asked.seed)
        return
    torch._dynamo.config.recompile_limit = 64
    with functorch_config.patch(activation_memory_budget=asked.activation_budget):
        for name in asked.names:
            shown = asked.steps, asked.budget, asked.seed, asked.ranges, not asked.alone, asked.kernels
            show(name, *train(CASES[name], *shown))


if __name__ == "__main__":
    main()
