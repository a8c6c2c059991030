"""Plans with fused kernels against `torch.compile` and its budgets, on this CPU.

usage: python benchmarks/fused.py [gpt llama resnet18 resnet50 unet vit ...] [--rounds 7] [--time-limit 8]

One run measures all in turn, and prints, for each model, a line for eager mode, for `torch.compile`, for its
``activation_memory_budget`` of .7, .5 and .3, and for plans with fused kernels: without recomputation, at the measured
peak of each of these, and at 60 % of `torch.compile`'s, there also with ops split along rows. A peak is that of the
allocator's events, parameters included. A time is the least of several rounds in which all take turns. Compilation is
in CPU seconds of this process and its children, with empty caches; it begins after a first C++ compilation, which
compiles headers for all.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from llama_like import LlamaLike
from one_step import CPU, cpu_seconds, peak_of, stepper
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import rematplan
from rematplan.ir import InfeasibleBudget
from rematplan.models import build
from rematplan.runtime.costs.measure import interleaved_seconds

STOCK = (0.7, 0.5, 0.3)
LEAST = 0.6
Batch = tuple[Tensor, Tensor]


class WithLoss(nn.Module):
    """A network and its cross entropy. ``budget``: that of `torch.compile`, which compiles anew for another one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.budget = network, 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy of the scores for ``x``, whose last dimension is the classes."""
        assert self.budget <= 1
        scores = self.network(x)
        return nn.functional.cross_entropy(scores.flatten(0, -2), y.flatten())


def text(network: nn.Module) -> tuple[WithLoss, Batch]:
    """Return a language model with its loss, and a batch of 4 × 256 tokens."""
    tokens = torch.randint(2048, (4, 257))
    return WithLoss(network), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def pictures(network: nn.Module, batch: int, size: int) -> tuple[WithLoss, Batch]:
    """Return a classifier with its loss, and a batch of square pictures."""
    return WithLoss(network), (torch.randn(batch, 3, size, size), torch.randint(100, (batch,)))


class ChannelsLast(nn.Module):
    """A network whose scores of pixels are returned with the classes as their last dimension."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (N, H, W, classes)."""
        scores: Tensor = self.network(x).movedim(1, -1)
        return scores


def segmentation(network: nn.Module, batch: int, size: int) -> tuple[WithLoss, Batch]:
    """Return a segmentation network with two classes and its loss, and a batch of square pictures."""
    labels = torch.randint(2, (batch, size, size))
    return WithLoss(ChannelsLast(network)), (torch.randn(batch, 3, size, size), labels)


MODELS: dict[str, Callable[[], tuple[WithLoss, Batch]]] = {
    "gpt": lambda: text(build("gpt12", tokens=256, depth=4, width=192, vocabulary=2048)),
    "llama": lambda: text(LlamaLike(tokens=256, depth=4, width=192, heads=6, groups=2, vocabulary=2048)),
    "resnet18": lambda: pictures(build("resnet18", image=64, width=32, classes=100), 16, 64),
    "resnet50": lambda: pictures(build("resnet50", image=64, width=32, classes=100), 16, 64),
    "unet": lambda: segmentation(build("unet", width=16, image=64), 4, 64),
    "vit": lambda: pictures(build("vit_s", image=96, depth=4, width=192, classes=100), 16, 96),
}


@dataclass
class Measured:
    """One way to run the step. ``promised``: the plan's peak in bytes; 0 without a plan."""

    name: str
    run: Callable[[], None]
    peak: int
    promised: int = 0
    compilation: float = 0.0
    kernels: int = 0


@contextmanager
def empty_cache() -> Iterator[None]:
    """Let Inductor begin with an empty cache."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        nn.Module.compile(warm := nn.ReLU())
        warm(torch.ones(64, requires_grad=True)).sum().backward()
        try:
            yield
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def compiled(model: WithLoss, batch: Batch, budget: float) -> Measured:
    """Measure `torch.compile` with a budget of its own."""
    model = copy.deepcopy(model)
    model.budget = budget
    called = torch.compile(model, dynamic=False)
    run = stepper(called, batch)
    with functorch_config.patch(activation_memory_budget=budget), empty_cache():
        began = cpu_seconds()
        run()
        seconds = cpu_seconds() - began
    name = "torch.compile" if budget == 1 else f"its budget {budget:g}"
    return Measured(name, run, peak_of(called, batch), compilation=seconds)


def planned(
    model: nn.Module, batch: Batch, budget: int | str, name: str, limit: float, **options: str
) -> Measured | None:
    """Measure a plan with these options of `plan_module`; None if no plan fits. ``limit``: seconds of search."""
    model = copy.deepcopy(model)
    strategy = rematplan.Auto(time_limit=limit)
    try:
        found = rematplan.plan_module(model, batch, budget=budget, strategy=strategy, refine=False, **options)
    except InfeasibleBudget as error:
        print(f"{name}: {error}")
        return None
    run = stepper(found, batch)
    kernels = {name for name in found.source.replace("(", " ").split() if name.startswith("fused_")}
    return Measured(name, run, peak_of(found, batch), found.plan.peak, kernels=len(kernels))


def fusing_seconds(model: nn.Module, batch: Batch) -> float:
    """Return the CPU seconds of compiling the kernels of a step."""
    from rematplan.module.captures import capture_call
    from rematplan.runtime.fuse.fuse import Kernels, fuse

    step = capture_call(model, batch, {})[1]
    with empty_cache():
        began = cpu_seconds()
        fuse(step, Kernels())
        return cpu_seconds() - began


def table(model: WithLoss, batch: Batch, limit: float, rounds: int) -> list[str]:
    """Measure a model in all measured, and return the lines of its table."""
    torch.compiler.reset()  # it compiles one function for a few models only
    seconds = fusing_seconds(model, batch)
    eager = stepper(model, batch)
    stock = [compiled(model, batch, budget) for budget in (1.0, *STOCK)]
    fused = partial(planned, model, batch, limit=limit, kernels="fused")
    plans = [fused("100%", "fused, no recomputation")]
    plans += [fused(one.peak, f"fused at the peak of {one.name}") for one in stock]
    least = partial(fused, int(LEAST * stock[0].peak))
    plans.append(least(f"fused at {LEAST:.0%} of torch.compile"))
    plans.append(least("the same, split", split="auto"))
    found = [one for one in plans if one is not None]
    measured = [Measured("eager", eager, peak_of(model, batch)), *stock, *found]
    times = interleaved_seconds({one.name: one.run for one in measured}, CPU, rounds, settling=1)
    against = {
        plan.name: one.name for plan, one in zip(plans[1:], [*stock, stock[0], stock[0]], strict=True) if plan
    }
    lines = [f"compiling the fused kernels: {seconds:.1f} s", ""]
    lines += ["| | peak MB | ÷ promise | ms | ÷ eager | ÷ stock | compile s | kernels |", "|---" * 8 + "|"]
    for one in measured:
        other = against.get(one.name)
        cells = (
            one.name,
            f"{one.peak / 1e6:.2f}",
            f"{one.peak / one.promised:.6f}" if one.promised else "",
            f"{1e3 * times[one.name]:.1f}",
            f"{times[one.name] / times['eager']:.3f}",
            f"{times[one.name] / times[other]:.3f}" if other else "",
            f"{one.compilation:.1f}" if one.compilation else "",
            str(one.kernels or ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["gpt", "llama", "resnet18"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=8.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        print(f"\n{name}", *table(model, batch, args.time_limit, args.rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
