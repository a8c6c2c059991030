"""Measure how long a planned module takes to find its plan in a call, and torch.compile to check its guards.

usage: python benchmarks/guard_times.py [NAME ...] [--rounds 15] [--calls 40]

Both are timed alternately in one process. ``finding``: the arguments, the module's state, the key and the guard of a
call whose plan is known. ``guards``: a call of a module compiled by torch.compile with a backend that computes
nothing. Prints medians over the rounds and their ranges in microseconds, and the median of the ratio within a round,
which other load on the machine changes less. Exit status 1 if a network's median is above its limit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import rematplan
from rematplan.models import ResNet


@dataclass(frozen=True)
class Case:
    """A model, its arguments, and ``limit``: the microseconds that finding its plan may take; None for no limit."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    limit: float | None = None


def encoder() -> Case:
    """Return twelve layers of `nn.TransformerEncoderLayer`, 32 features wide, without a limit."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 12), (torch.randn(2, 8, 32),), {})


def resnet50() -> Case:
    """Return a ResNet-50 of width 8 with a limit of 300 µs. The width does not matter for the time of guards."""
    return Case(ResNet(50, 8, 10), (torch.randn(2, 3, 64, 64),), {}, 300)


def bert12() -> Case:
    """Return the ``transformers`` BERT of twelve layers, 48 features wide, with a limit of 200 µs.

    Its forward branches on the values of the attention mask, which a guard must check.
    """
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=48, num_attention_heads=12, intermediate_size=96, vocab_size=100)
    words = torch.randint(100, (2, 16))
    return Case(BertModel(config), (), {"input_ids": words, "attention_mask": torch.ones_like(words)}, 200)


CASES = {"encoder": encoder, "resnet50": resnet50, "bert12": bert12}


def finding(case: Case) -> Callable[[], object]:
    """Plan the case's model, and return a function that only finds the plan of a call with the case's arguments."""
    planned = rematplan.plan_module(
        case.model, case.args, dict(case.kwargs), budget="4GiB", strategy="store_all", costs="roofline"
    )
    runner, kwargs = planned._rematplan, dict(case.kwargs)
    return lambda: runner.find(planned, case.args, kwargs)


def guards(case: Case) -> Callable[[], object]:
    """Return a function that calls the case's model under `torch.compile` without its computation.

    Its backend computes in the first call only, and returns the same results in later calls, so that a call takes as
    long as checking the guards.
    """

    def empty(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        results: list[Any] = []

        def call(*args: Any) -> Any:
            results.extend([r.detach() for r in graph(*args)] if not results else [])
            return results

        return call

    compiled = torch.compile(case.model, backend=empty)
    return lambda: compiled(*case.args, **case.kwargs)


def per_call(call: Callable[[], object], calls: int) -> float:
    """Return the median time of ``calls`` calls, in microseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def shown(values: list[float]) -> str:
    """Return times as text: their median, and the range in brackets."""
    return f"{statistics.median(values):6.0f} ({min(values):.0f}–{max(values):.0f})"


def main() -> int:
    """Measure and print. Return the exit status: 1 if the median of a model is above its limit, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=40, help="in a round, of each")
    options = parser.parse_args()
    over = False
    print(f"{'':10} {'finding, µs':>20} {'guards, µs':>20} {'ratio':>6}")
    for name in options.names:
        torch.manual_seed(0)
        case = CASES[name]()
        ours, theirs = finding(case), guards(case)
        for call in (ours, theirs):
            per_call(call, options.calls)  # warms up
        rounds = [
            (per_call(ours, options.calls), per_call(theirs, options.calls)) for _ in range(options.rounds)
        ]
        found, checked = ([pair[at] for pair in rounds] for at in (0, 1))
        ratio = statistics.median(a / b for a, b in rounds)
        print(f"{name:10} {shown(found):>20} {shown(checked):>20} {ratio:6.2f}")
        over |= case.limit is not None and statistics.median(found) > case.limit
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main())
