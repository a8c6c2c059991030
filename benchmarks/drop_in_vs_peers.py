"""Compare `plan_module` with PyTorch's own methods of saving memory, alternately in one process.

usage: python benchmarks/drop_in_vs_peers.py [NAME ...] [--rounds 5] [--time-limit 20]

For each peer: its measured peak (parameters, buffers, batch, activations, gradients and workspaces), its least step
time as a ratio to eager mode's, and the same for a plan whose budget is that peak. Then plans for a ladder of budgets
down to below the leanest peer: the smallest peak of a plan that was measured to be no slower than a peer, as a share
of the peer's peak. A plan without a limit is measured first, together with eager mode only: with many models in one
process, two models with the same plan differ by up to a tenth.

Peers: `torch.utils.checkpoint` for each block; `checkpoint_sequential` over a network's sequence of blocks, with √n
segments; selective checkpointing for each block, which saves products, convolutions and attention;
`activation_memory_budget`, with the min-cut partitioner and without a compiler. Checkpointing runs batch norm twice
and so updates its statistics twice; plans do not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from one_step import CPU, peak_of, stepper
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import rematplan
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.models import build, example_inputs
from rematplan.models.resnet import Residual
from rematplan.models.transformer import Block
from rematplan.runtime.costs.measure import interleaved_seconds

RUNGS, LOWEST = 6, 0.85
"""Of the ladder of budgets; its lowest as a share of the leanest peer's peak."""
ATEN = torch.ops.aten
DEAR = {
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.addmm.default,
    ATEN.convolution.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What selective checkpointing saves."""


@dataclass(frozen=True)
class Case:
    """A network to compare on.

    ``name``: of the case. ``network``: the network's name in the zoo. ``sizes``: its sizes. ``block``: the class of the
    modules that are checkpointed. ``sequence``: the name of the attribute with its sequence of blocks; None if it has
    none.
    """

    name: str
    network: str
    sizes: Mapping[str, int]
    block: type[nn.Module]
    sequence: str | None = None


CASES = {
    c.name: c
    for c in (
        Case("unet", "unet", {"batch": 2, "image": 192, "width": 32}, nn.Sequential),
        Case("resnet50", "resnet50", {"batch": 8, "image": 224}, Residual, "stages"),
        Case(
            "gpt6",
            "gpt12",
            {"batch": 2, "tokens": 512, "depth": 6, "width": 768, "vocabulary": 8192},
            Block,
            "blocks",
        ),
        Case(
            "gpt24",
            "gpt24",
            {"batch": 4, "tokens": 256, "depth": 24, "width": 128, "vocabulary": 1024},
            Block,
            "blocks",
        ),
        Case("vit_s", "vit_s", {"batch": 4, "image": 224}, Block, "blocks"),
    )
}


class MeanSquare(nn.Module):
    """A network together with a mean square loss, so that the loss's memory belongs to the model under every method."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mean square of the network's output."""
        return cast(Tensor, self.network(*inputs)).pow(2).mean()


def network(case: Case) -> MeanSquare:
    """Return the case's network with its loss, with weights from a fixed seed."""
    torch.manual_seed(0)
    return MeanSquare(build(case.network, **{k: v for k, v in case.sizes.items() if k != "batch"}))


def checkpointed(case: Case, **options: Any) -> nn.Module:
    """Return the network with each of its blocks under `torch.utils.checkpoint`. ``options``: arguments of
    `checkpoint`."""
    model = network(case)
    for block in [m for m in model.modules() if isinstance(m, case.block)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)  # type: ignore[method-assign]
    return model


def saving(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Return the policy of selective checkpointing for an op: save results of products, convolutions and attention
    (`DEAR`)."""
    return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


def selective(case: Case) -> nn.Module:
    """Return the network with each of its blocks under selective checkpointing, which saves the results of `DEAR`
    ops."""
    return checkpointed(case, context_fn=partial(create_selective_checkpoint_contexts, saving))


def in_sequence(case: Case) -> nn.Module:
    """Return the network with its sequence of n blocks under `checkpoint_sequential`, in √n segments."""
    model = network(case)
    sequence = getattr(model.network, case.sequence or "")
    segments = max(2, round(math.sqrt(len(sequence))))
    blocks = list(sequence)
    sequence.forward = lambda x: checkpoint_sequential(blocks, segments, x, use_reentrant=False)
    return model


def partitioned(case: Case, budget: float) -> nn.Module:
    """Return the network split by PyTorch's min-cut partitioner, with ``budget`` as its `activation_memory_budget` (0
    to 1)."""
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)
    model = network(case)
    compiled = torch.compile(model, backend=backend)
    with functorch_config.patch(activation_memory_budget=budget):
        compiled(
            *example_inputs(case.network, **case.sizes)
        ).sum().backward()  # compiled while the budget holds
    model.zero_grad()
    return cast(nn.Module, compiled)


def peers(case: Case) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the model of each method for a case: eager mode first, then PyTorch's methods of saving
    memory.

    A method that fails is left out, with a printed line.
    """
    yield "eager", network(case)
    yield "checkpoint", checkpointed(case)
    if case.sequence:
        yield "sequential", in_sequence(case)
    yield "selective", selective(case)
    for budget in (0.8, 0.5, 0.3):
        try:
            yield f"budget {budget}", partitioned(case, budget)
        except RuntimeError as error:  # seen with batch norm in training mode
            print(f"  budget {budget}: fails: {str(error).split(':')[0]}", flush=True)


def ladder(peaks: Collection[int]) -> Iterator[tuple[str, int]]:
    """Yield names and budgets in bytes, in equal ratios from below the largest peak down to `LOWEST` times the
    smallest."""
    ratio = (LOWEST * min(peaks) / max(peaks)) ** (1 / RUNGS)
    for k in range(1, RUNGS + 1):
        yield f"rung {k}", int(max(peaks) * ratio**k)


@contextmanager
def told(name: str) -> Iterator[None]:
    """A context in which an `InfeasibleBudget` is printed and not raised. ``name``: the method whose peak is the
    budget."""
    try:
        yield
    except InfeasibleBudget as error:
        print(f"  at {name}'s peak: {error}", flush=True)


def without_limit(case: Case, inputs: tuple[Tensor, ...], rounds: int, time_limit: float) -> str:
    """Return, as text, the times of two models planned without a memory limit, and of a second eager one, ÷ eager
    mode's."""
    models = {name: network(case) for name in ("eager", "planned", "planned again", "eager again")}
    for name in ("planned", "planned again"):
        models[name] = rematplan.plan_module(
            models[name], inputs, budget=2**62, strategy=rematplan.Auto(time_limit=time_limit)
        )
    steps = {name: stepper(m, inputs) for name, m in models.items()}
    seconds = interleaved_seconds(steps, CPU, 2 * rounds, settling=1)
    return ", ".join(f"{name} × {s / seconds['eager']:.3f}" for name, s in seconds.items() if name != "eager")


def run(case: Case, rounds: int, time_limit: float) -> None:
    """Measure all methods on one network, plan within the peak of each, and print a line for each."""
    inputs = example_inputs(case.network, **case.sizes)
    unlimited = without_limit(case, inputs, rounds, time_limit)
    models = dict(peers(case))
    peaks = {name: peak_of(model, inputs) for name, model in models.items()}
    ours: dict[str, nn.Module] = {}
    for name, peak in [*peaks.items(), *ladder(peaks.values())]:
        with told(name):
            ours[name] = rematplan.plan_module(
                network(case), inputs, budget=peak, strategy=rematplan.Auto(time_limit=time_limit)
            )
    steps = {name: stepper(m, inputs) for name, m in models.items()}
    steps |= {f"plan at {name}": stepper(m, inputs) for name, m in ours.items()}
    our_peaks = {name: peak_of(m, inputs) for name, m in ours.items()}
    seconds = interleaved_seconds(steps, CPU, rounds, settling=1)
    eager = seconds["eager"]
    sizes = ", ".join(f"{k} {v}" for k, v in case.sizes.items())
    print(f"{case.network}, {sizes}: eager {show_bytes(peaks['eager'])}, {eager:.3f} s", flush=True)
    print(f"  without a limit, beside eager alone: {unlimited}", flush=True)
    for name in peaks:
        theirs = f"{show_bytes(peaks[name]):>11} × {seconds[name] / eager:.3f}"
        if name in ours:
            time = seconds[f"plan at {name}"]
            text = f"{show_bytes(our_peaks[name]):>11} × {time / eager:.3f}"
            extra = seconds[name] - eager
            plan = ours[name].plan
            text += f" (overhead {plan.estimate.overhead:.1%}, proven floor {plan.lower_bound or 0:.1%})"
            text += (
                f"   extra time ÷ theirs {(time - eager) / extra:5.2f}" if extra > 0.01 * eager else " " * 27
            )
            quick = [p for n, p in our_peaks.items() if seconds[f"plan at {n}"] <= seconds[name]]
            text += f"   peak at its time ÷ its {min(quick, default=math.nan) / peaks[name]:.3f}"
            print(f"  {name:11} {theirs}   planned {text}", flush=True)


def main() -> None:
    """Measure each named network, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=20.0)
    args = parser.parse_args()
    for name in args.names:
        run(CASES[name], args.rounds, args.time_limit)


if __name__ == "__main__":
    main()
