"""Trainers as users have them: a loop with an odd last batch, and Hugging Face models against gradient checkpointing.

usage: python benchmarks/trainers.py [loop] [gpt2] [bert] [llama] [--rounds 7] [--time-limit 10]

`loop`: a U-Net, AdamW, 66 samples in batches of 32, so that the last batch has 2; planned at 60 % of its first batch's
peak. It prints the budget, and for each batch size the measured peak and the time as a ratio to eager mode's, whether
the parameters at the end equal eager mode's bit by bit, and the warnings.

`gpt2`, `bert`, `llama`: random weights, `labels=` given, so that the model returns its loss and its logits. The budget
is the measured peak of the model's own gradient checkpointing. It prints peaks, step times as ratios to eager mode's,
taken in turn, and whether loss and gradients equal eager mode's bit by bit. These need `transformers`.

Exit status 1 if a peak exceeds its budget, a budget is refused, or bits differ.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from promise import Made, of_hugging_face, step_of
from torch import nn
from torch.utils._pytree import tree_leaves

import rematplan
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.models import build
from rematplan.module.verification import same_bits
from rematplan.runtime.costs.measure import interleaved_rounds, peak_above_entry, seconds_of

CPU = torch.device("cpu")
SAMPLES, BATCH = 66, 32
BUDGET = "60%"


def labelled(vocabulary: int, rows: int, tokens: int) -> Callable[[], dict[str, Any]]:
    """Return a function that makes keyword arguments: random sentences (``rows``, ``tokens``), which are their own
    labels."""

    def make() -> dict[str, Any]:
        ids = torch.randint(3, vocabulary, (rows, tokens))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    return make


WORDS = 2000
LAYERS = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": WORDS}
SENTENCES = labelled(WORDS, 4, 128)
MODELS: Mapping[str, Callable[[], Made]] = {
    "gpt2": of_hugging_face(
        "GPT2LMHeadModel",
        SENTENCES,
        vocab_size=WORDS,
        n_embd=256,
        n_layer=8,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bert": of_hugging_face("BertForMaskedLM", SENTENCES, intermediate_size=1024, **LAYERS),
    "llama": of_hugging_face(
        "LlamaForCausalLM", SENTENCES, intermediate_size=688, num_key_value_heads=2, **LAYERS
    ),
}


def fixed_bytes(model: nn.Module, batch: object) -> int:
    """Return the bytes of a model's parameters and buffers and of a batch. A storage that several share counts once."""
    held = [t for t in (*model.parameters(), *model.buffers(), *tree_leaves(batch)) if torch.is_tensor(t)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


@dataclass(frozen=True)
class Trainer:
    """A model and its optimizer, with the two halves of a training step: `backward` and `update`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module) -> Trainer:
        """Return a trainer of a model with AdamW at its default settings."""
        return cls(model, torch.optim.AdamW(model.parameters()))

    def backward(self, images: torch.Tensor) -> None:
        """Compute the gradients of the mean square of the model's output for a batch of images."""
        self.model(images).square().mean().backward()

    def update(self) -> None:
        """Update the parameters, and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def loop(rounds: int, time_limit: float) -> bool:
    """Train a U-Net in a loop whose last batch is smaller, planned and in eager mode; print the figures.

    Return whether the measured peaks are within the budget and the final parameters equal eager mode's bit by bit.
    """
    torch.manual_seed(0)
    batches = torch.randn(SAMPLES, 3, 64, 64).split(BATCH)
    model = build("unet", width=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        planned = rematplan.plan_module(
            copy.deepcopy(model), (batches[0],), budget=BUDGET, strategy=rematplan.Auto(time_limit=time_limit)
        )
        trainers = {"eager mode": Trainer.of(model), "planned": Trainer.of(planned)}
        peaks, seconds = (
            defaultdict[tuple[str, int], int](int),
            defaultdict[tuple[str, int], list[float]](list),
        )
        for epoch in range(1 + rounds):
            for images in batches:
                for name, trainer in trainers.items():
                    call = partial(trainer.backward, images)
                    if epoch == 0:
                        above, _ = peak_above_entry(call, CPU)
                        key = name, len(images)
                        peaks[key] = max(peaks[key], above + fixed_bytes(trainer.model, images))
                    else:
                        seconds[name, len(images)].append(seconds_of(call, CPU))
                    trainer.update()
    budget = planned.plan.budget or 0
    print(f"loop: budget {BUDGET} = {show_bytes(budget)}, {len(planned.plans)} plans")
    for size in sorted({len(images) for images in batches}, reverse=True):
        ours, eager = (peaks[name, size] for name in ("planned", "eager mode"))
        ratio = statistics.median(seconds["planned", size]) / statistics.median(seconds["eager mode", size])
        print(
            f"  batch {size:>2}: eager mode {show_bytes(eager)}, planned {show_bytes(ours)}, "
            f"measured ÷ budget {ours / budget:.4f}, step time ÷ eager mode's {ratio:.3f}"
        )
    kept = max(peaks[key] for key in peaks if key[0] == "planned") <= budget
    equal = all(map(same_bits, planned.parameters(), model.parameters()))
    print(f"  parameters after {1 + rounds} epochs: {'bit-equal' if equal else 'DIFFER'}")
    for text in {str(one.message) for one in said}:
        print(f"  warning: {text}")
    return kept and equal


def left_by(model: nn.Module, made: Made) -> list[torch.Tensor]:
    """Run a step from a fixed seed, and return its outputs, then the gradients of the parameters that have one."""
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    outputs = step_of(model, *made[1:])()
    return [*outputs, *(p.grad for p in model.parameters() if p.grad is not None)]


def against_checkpointing(name: str, rounds: int, time_limit: float) -> bool:
    """Plan a model within the peak of its own gradient checkpointing, and print peaks and times of both.

    Return whether the measured peak is within the budget and the results equal eager mode's bit by bit; False if no
    plan fits. ``name``: a key of `MODELS`.
    """
    made = MODELS[name]()
    models = {"eager mode": made[0], "gradient checkpointing": copy.deepcopy(made[0])}
    models["gradient checkpointing"].gradient_checkpointing_enable()

    def stepping(model: nn.Module) -> Callable[[], None]:
        step = step_of(model, *made[1:])

        def run() -> None:
            model.zero_grad(set_to_none=True)
            step()

        return run

    def peak(model: nn.Module) -> int:
        model.zero_grad(set_to_none=True)
        return fixed_bytes(model, made[1:]) + peak_above_entry(stepping(model), CPU)[0]

    budget = peak(models["gradient checkpointing"])
    try:
        models["planned"] = rematplan.plan_module(
            copy.deepcopy(made[0]),
            *made[1:],
            budget=budget,
            refine=False,
            strategy=rematplan.Auto(time_limit=time_limit),
        )
    except InfeasibleBudget as error:
        print(f"{name}: gradient checkpointing's peak, {show_bytes(budget)}, is REFUSED: {error}")
        return False
    peaks = {which: peak(model) for which, model in models.items()}
    wrong = not all(map(same_bits, left_by(models["planned"], made), left_by(models["eager mode"], made)))
    times = interleaved_rounds({which: stepping(model) for which, model in models.items()}, CPU, rounds)
    print(
        f"{name}: plan's overhead {models['planned'].plan.estimate.overhead:.2%}, bits {'DIFFER' if wrong else 'equal'}"
    )
    for which in models:
        ratios = [a / b for a, b in zip(times[which], times["eager mode"], strict=True)]
        print(
            f"  {which:<22} {show_bytes(peaks[which]):>12}  step time ÷ eager mode's "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return peaks["planned"] <= budget and not wrong


def main() -> int:
    """Run the named parts. Return the exit status: 0 if all kept the budget and the bits, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["loop", *MODELS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=10.0)
    options = parser.parse_args()
    every = {"loop": loop, **{name: partial(against_checkpointing, name) for name in MODELS}}
    kept = [every[name](options.rounds, options.time_limit) for name in options.names]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
