"""`plan_module` against eager autograd and `torch.utils.checkpoint` per block, in turn in one process.

usage: python benchmarks/drop_in_vs_checkpoint.py [NAME ...] [--rounds 5] [--time-limit 20]

The plan's budget is the peak that checkpointing was measured to have. Prints for each the measured peak (everything
held: parameters, buffers, batch, activations, gradients, workspaces) and the least step time as a ratio to eager's.
Checkpointing runs batch norm twice and so updates its statistics twice; the plan does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematplan
from rematplan.ir import show_bytes
from rematplan.models import build, example_inputs
from rematplan.models.resnet import Residual
from rematplan.runtime.measure import peak_above_entry, seconds_in_turn

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A network and its sizes; ``block``: the class of the modules that are checkpointed."""

    name: str
    batch: int
    image: int
    width: int
    block: type[nn.Module]


CASES = {c.name: c for c in (Case("unet", 2, 192, 32, nn.Sequential), Case("resnet50", 8, 224, 64, Residual))}


def checkpointed(case: Case) -> nn.Module:
    """The network with every block under `torch.utils.checkpoint`."""
    model = build(case.name, image=case.image, width=case.width)
    for block in [m for m in model.modules() if isinstance(m, case.block)]:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)  # type: ignore[method-assign]
    return model


def stepper(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A step: forward, a mean square as the loss, backward."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).pow(2).mean().backward()

    return step


def measured(model: nn.Module, x: Tensor) -> int:
    """The step's peak, bytes, everything it holds counted."""
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    step = stepper(model, x)
    step()
    model.zero_grad(set_to_none=True)
    return held + peak_above_entry(step, CPU)[0]


def run(case: Case, rounds: int, time_limit: float) -> None:
    """Measure and print one network."""
    (x,) = example_inputs(case.name, case.batch, case.image)
    models = {"eager": build(case.name, image=case.image, width=case.width), "checkpoint": checkpointed(case)}
    peaks = {name: measured(model, x) for name, model in models.items()}
    budget = peaks["checkpoint"]
    models["planned"] = rematplan.plan_module(
        build(case.name, image=case.image, width=case.width),
        (x,),
        budget=budget,
        options={"time_limit": time_limit},
    )
    peaks["planned"] = measured(models["planned"], x)
    seconds = seconds_in_turn({n: stepper(m, x) for n, m in models.items()}, CPU, rounds)
    print(f"{case.name} {case.batch}×{case.image}, width {case.width}; {models['planned'].plan}")
    for name in models:
        ratio = seconds[name] / seconds["eager"]
        print(f"  {name:11} peak {show_bytes(peaks[name]):>11}   {seconds[name]:.3f} s   × {ratio:.3f}")
    extra = {name: seconds[name] - seconds["eager"] for name in models}
    print(f"  planned's extra time ÷ checkpoint's: {extra['planned'] / extra['checkpoint']:.2f}")


def main() -> None:
    """Each network in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=20.0)
    args = parser.parse_args()
    for name in args.names:
        torch.manual_seed(0)
        run(CASES[name], args.rounds, args.time_limit)


if __name__ == "__main__":
    main()
