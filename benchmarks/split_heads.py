"""Split plans against heads that are divided by hand, on this CPU: peak and time of a training step without optimizer.

usage: python benchmarks/split_heads.py [llama gpt] [--rounds 7] [--seconds 10]

One run measures all in turn: the loss of whole scores (eager), chunks of tokens under `torch.utils.checkpoint`, a fused
linear cross entropy (the algorithm of Liger: each chunk's gradients in its forward) and `F.linear_cross_entropy`. At
the measured peak of each, a plan with `split="auto"` of the plain model. A peak is that of the allocator's events,
parameters and batch included. A time is in CPU seconds of the one thread, the least of several rounds in turn.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from fused import Measured, planned
from llama_like import LlamaLike
from one_step import peak_of, stepper
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rematplan.models import build

CHUNKS = 8
TOKENS, WIDTH, DEPTH, VOCABULARY = 256, 192, 2, 16_000

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden states (rows, width), weights (words, width) and targets (rows,) to the mean cross entropy."""


def whole(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Compute all scores at once."""
    return functional.cross_entropy(functional.linear(x, weight), y)


def checkpointed(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Compute a chunk's scores again in the backward."""

    def part(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight), y, reduction="sum")

    pairs = zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True)
    sums = [checkpoint(part, a, weight, b, use_reentrant=False) for a, b in pairs]
    return torch.stack(sums).sum() / len(y)


class FusedHead(torch.autograd.Function):
    """A fused linear cross entropy: the forward computes a chunk's loss and gradients, so scores exist once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        """Compute the loss and both gradients."""
        loss, by_x, by_weight = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        parts = zip(x.chunk(CHUNKS), by_x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True)
        for a, by_a, b in parts:
            scores = a @ weight.T
            loss += functional.cross_entropy(scores, b, reduction="sum")
            scores = scores.softmax(-1)
            scores[torch.arange(len(b)), b] -= 1
            scores /= len(y)
            torch.mm(scores, weight, out=by_a)
            by_weight.addmm_(scores.T, a)
        ctx.save_for_backward(by_x, by_weight)
        return loss / len(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Multiply the gradients by that of the loss."""
        by_x, by_weight = ctx.saved_tensors
        return by_x.mul_(grads[0]), by_weight.mul_(grads[0]), None


def fused(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Compute scores once, a chunk at a time."""
    found: Tensor = FusedHead.apply(x, weight, y)  # type: ignore[no-untyped-call]
    return found


def of_pytorch(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Call PyTorch's own function, in chunks if this version has the option."""
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    return functional.linear_cross_entropy(x, weight, y, **({"options": options()} if options else {}))


HEADS: Mapping[str, Head] = {
    "whole scores (eager)": whole,
    f"{CHUNKS} chunks, checkpointed": checkpointed,
    f"fused head, {CHUNKS} chunks": fused,
    "F.linear_cross_entropy": of_pytorch,
}


class LanguageModel(nn.Module):
    """A body that returns hidden states, with a head and its loss."""

    def __init__(self, network: nn.Module, words: nn.Parameter, head: Head) -> None:
        super().__init__()
        self.network, self.words, self.head = network, words, head

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return self.head(self.network(tokens).flatten(0, 1), self.words, targets.flatten())


def llama(head: Head) -> LanguageModel:
    """Return a decoder whose words of the head are its own."""
    network = LlamaLike(tokens=TOKENS, depth=DEPTH, width=WIDTH, heads=6, groups=2, vocabulary=VOCABULARY)
    words, network.head = network.head.weight, nn.Identity()  # type: ignore[assignment]
    return LanguageModel(network, words, head)


def gpt(head: Head) -> LanguageModel:
    """Return a decoder whose head has the words of its embedding."""
    network: Any = build("gpt12", tokens=TOKENS, depth=DEPTH, width=WIDTH, vocabulary=VOCABULARY)

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens: Tensor) -> Tensor:
            one = self.network
            x = one.embedding(tokens) + one.positions.weight[: tokens.shape[1]]
            hidden: Tensor = one.norm(one.blocks(x))
            return hidden

    return LanguageModel(Body(), network.embedding.weight, head)


MODELS = {"llama": llama, "gpt": gpt}


def table(make: Callable[[Head], LanguageModel], rounds: int, seconds: float) -> list[str]:
    """Measure a model with each head, and a plan at the peak of each."""
    model = make(whole)
    tokens = torch.randint(VOCABULARY, (4, TOKENS + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    by_hand = []
    for name, head in HEADS.items():
        own = copy.deepcopy(model)
        own.head = head
        by_hand.append(Measured(name, stepper(own, batch), peak_of(own, batch)))
    plans = [
        planned(model, batch, one.peak, f"plan at the peak of {one.name}", seconds, split="auto")
        for one in by_hand
    ]
    measured = [*by_hand, *(one for one in plans if one is not None)]
    times = {one.name: math.inf for one in measured}
    for _ in range(rounds):
        for one in measured:
            one.run()  # after the others, caches are theirs
            began = time.process_time()
            one.run()
            times[one.name] = min(times[one.name], time.process_time() - began)
    eager, of = times[by_hand[0].name], {p.name: one.name for p, one in zip(plans, by_hand, strict=True) if p}
    lines = ["| | peak MB | ÷ promise | ms | ÷ eager | ÷ by hand |", "|---" * 6 + "|"]
    for one in measured:
        promise = f"{one.peak / one.promised:.4f}" if one.promised else ""
        other = f"{times[one.name] / times[of[one.name]]:.3f}" if one.name in of else ""
        lines.append(
            f"| {one.name} | {one.peak / 1e6:.1f} | {promise} | {1e3 * times[one.name]:.0f} "
            f"| {times[one.name] / eager:.3f} | {other} |"
        )
    return lines


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        torch.manual_seed(0)
        print(f"\n{name}", *table(MODELS[name], args.rounds, args.seconds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
