"""Training on random lengths: how long a new shape waits before its step, whether peaks stay within the budget, and
the time of the whole loop against eager mode.

Each network is planned for its largest size, at a share of that size's peak, and then trained on random sizes. Outputs
and gradients of each step are compared with eager mode's bit by bit, in the same loop. The waiting time of a step is
that of `prepare` for its batch. Times are CPU seconds of this process (one thread), so that a busy machine does not
count; the process that refines plans is not in them. ``grown`` is what the process's resident memory gained from the
middle of the loop to its end.

usage: python benchmarks/shapes.py [NAME ...] [--steps 100] [--budget 70%] [--seed 0]
"""

from __future__ import annotations

import argparse
import copy
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import show_bytes
from rematplan.models import build
from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")
VOCABULARY = 1000


@dataclass(frozen=True)
class Case:
    """A network that is trained on batches of varying size (length, or side of an image).

    ``make``: builds it for sizes up to ``largest``. ``batch``: returns a batch of a size. ``least``, ``step``: sizes
    are ``least``, ``least + step`` and so on, up to ``largest``.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    least: int
    largest: int
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
    "bert": Case(_bert, _masked, 32, 256),
    "gpt": Case(_gpt, _tokens, 32, 256),
    "llama": Case(_llama, _tokens, 32, 256),
    "unet": Case(lambda: build("unet", width=8), _images, 32, 160, 16),
}


@dataclass
class Result:
    """The measurements of one training loop. Times are CPU seconds.

    ``first``: of making the first plan. ``waits``: of preparing each new size. ``again``: of preparing each known size.
    ``peaks``: the peak of each step ÷ the budget. ``planned``, ``eager``: of the whole loop. ``different``: the number
    of steps whose gradients differ from eager mode's. ``growth``: bytes of resident memory gained in the second half of
    the loop.
    """

    first: float = 0.0
    waits: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    planned: float = 0.0
    eager: float = 0.0
    different: int = 0
    growth: int = 0


def _step(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    """Run forward, a mean square loss, and backward. Gradients are None at the beginning."""
    for parameter in model.parameters():
        parameter.grad = None
    model(*batch).square().mean().backward()


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def train(case: Case, steps: int, budget: str, seed: int) -> tuple[Result, rematplan.PlanningStats, int]:
    """Train one network on ``steps`` batches of random size, next to a copy in eager mode.

    Return the measurements, the planning statistics, and the budget in bytes.
    """
    torch.manual_seed(seed)
    model, result, sizes = case.make().train(), Result(), random.Random(seed)
    eager = copy.deepcopy(model)
    began = time.process_time()
    planned = rematplan.plan_module(model, case.batch(case.largest), budget=budget)
    result.first = time.process_time() - began
    bytes_ = planned.plan.budget or planned.plan.peak
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    met, half = {case.largest}, 0
    for at in range(steps):
        size = sizes.randrange(case.least, case.largest + 1, case.step)
        batch = case.batch(size)
        wait = _seconds(lambda batch=batch: planned.prepare(*batch))  # type: ignore[misc]
        (result.again if size in met else result.waits).append(wait)
        met.add(size)
        torch.manual_seed(at)
        result.eager += _seconds(lambda batch=batch: _step(eager, batch))  # type: ignore[misc]
        torch.manual_seed(at)
        result.planned += wait + _seconds(lambda batch=batch: _step(planned, batch))  # type: ignore[misc]
        pairs = zip(model.named_parameters(), eager.parameters(), strict=True)
        result.different += any(_differ(a.grad, b.grad) for (_, a), b in pairs)
        for parameter in model.parameters():
            parameter.grad = None
        peak = peak_above_entry(lambda batch=batch: _step(planned, batch), CPU)[0]  # type: ignore[misc]
        result.peaks.append((resident + peak + sum(t.nbytes for t in batch)) / bytes_)
        half = _resident() if at == steps // 2 else half
    result.growth = _resident() - half
    return result, rematplan.planning(planned).stats(), bytes_


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b))


def main() -> None:
    """Train each named network, and print a row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in asked.names:
        result, stats, budget = train(CASES[name], asked.steps, asked.budget, asked.seed)
        waits, again = sorted(result.waits), result.again or [0.0]
        print(
            f"{name}: budget {show_bytes(budget)}; first plan {result.first:.1f} s; {len(waits)} new shapes wait "
            f"{1e3 * statistics.median(waits):.0f} ms in the median ({1e3 * waits[0]:.0f} to {1e3 * waits[-1]:.0f}), "
            f"known ones {1e3 * statistics.median(again):.1f} ms; peak at most {max(result.peaks):.3f} of the budget; "
            f"loop {result.planned / result.eager:.2f} of eager's {result.eager:.1f} s, "
            f"{(result.planned - sum(result.waits)) / result.eager:.2f} without waiting; {result.different} of "
            f"{asked.steps} steps differ; {show_bytes(result.growth)} grown; captures {stats.captures}, with open "
            f"sizes {stats.open_captures}, instances {stats.instances}; plans exchanged {stats.swaps}"
            + "".join(f"; {reason}" for reason in stats.reasons),
            flush=True,
        )


if __name__ == "__main__":
    main()
