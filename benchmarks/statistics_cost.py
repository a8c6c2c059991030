"""Measure the cost of Kronecker statistics: steps with statistics, and with statistics in every tenth step, against
eager.

usage: python benchmarks/statistics_cost.py [resnet50|resnet18|gpt ...] [--batch 8] [--image 224] [--width 64]
       [--budget 64GiB] [--fisher mc] [--every 10] [--rounds 5] [--costs profile]

For each kind of statistics: the least CPU time of a step with them ÷ eager mode's; the same, spread over --every
steps; the overhead that they add to the plan's; the factors' bytes and the peaks of both plans; and the measured peak
÷ the planned one.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import rematplan
from rematplan.ir import show_bytes
from rematplan.models.resnet import ResNet
from rematplan.runtime.costs.measure import peak_above_entry

VARIANTS: dict[str, dict[str, Any]] = {
    "expand": {"approx": "expand"},
    "expand, 1/8 of the rows": {"approx": "expand", "share": 1 / 8},
    "reduce": {"approx": "reduce"},
}


class GPT(nn.Module):
    """A language model of ``blocks`` pre-norm transformer blocks, without dropout.

    ``width``: the features of a token. ``words``: the number of distinct tokens. ``places``: the largest length.
    """

    def __init__(self, width: int, blocks: int, words: int, places: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        layer = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 64), activation="gelu", **layer)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores (samples, places, words) for token numbers (samples, places)."""
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            h = block(h, src_mask=mask)
        return self.head(h)


def made(name: str, args: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    """Return a model that computes scores, and a batch of its inputs. ``name``: ``gpt``, ``resnet18`` or
    ``resnet50``."""
    torch.manual_seed(0)
    if name == "gpt":
        model = GPT(args.width, args.blocks, 256, args.places)
        return model, torch.randint(0, 256, (args.batch, args.places))
    x = torch.randn(args.batch, 3, args.image, args.image)
    return ResNet(int(name.removeprefix("resnet")), args.width, 1000), x


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of scores (…, classes) with fixed labels."""
    logits = y.flatten(0, -2)
    return functional.cross_entropy(logits, torch.arange(len(logits), device=y.device) % logits.shape[1])


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Run forward and backward, and return the CPU seconds that they took."""
    model.zero_grad(set_to_none=True)
    began = time.process_time()
    loss_of(model(x)).backward()
    return time.process_time() - began


def measure(name: str, args: argparse.Namespace) -> None:
    """Measure one model in eager mode, planned, and planned with each kind of statistics; print its lines."""
    model, x = made(name, args)
    plain = rematplan.plan_module(
        copy.deepcopy(model),
        (x,),
        budget=args.budget,
        costs=args.costs,
        strategy=rematplan.Auto(time_limit=args.time_limit),
    )
    models: dict[str, nn.Module] = {"eager": copy.deepcopy(model), "plain plan": plain}
    for variant, options in VARIANTS.items():
        statistics = rematplan.Kronecker(fisher=args.fisher, **options)
        budget = args.budget
        if args.share_of_peak:
            whole = rematplan.plan_module(
                copy.deepcopy(model),
                (x,),
                budget="64GiB",
                strategy="store_all",
                costs=args.costs,
                statistics=statistics,
            )
            peak = max(p.peak for p in rematplan.planning(whole).plans)
            budget = str(int(args.share_of_peak * peak))
        models[variant] = rematplan.plan_module(
            copy.deepcopy(model),
            (x,),
            budget=budget,
            costs=args.costs,
            statistics=statistics,
            strategy=rematplan.Auto(time_limit=args.time_limit),
        )
    least = dict.fromkeys(models, float("inf"))
    for at in range(args.rounds + 1):
        for variant, one in models.items():
            took = step(one, x)
            least[variant] = min(least[variant], took) if at else least[variant]
    eager, own = least["eager"], least["plain plan"] / least["eager"]
    print(f"{name}: eager {eager:.3f} s; plain plan ÷ eager {own:.3f}, peak {show_bytes(plain.plan.peak)}")
    for variant in VARIANTS:
        planning = rematplan.planning(models[variant])
        factors = planning.statistics().factors
        packed = {id(t): t.nbytes for w in factors for pair in factors.packed(w) for t in pair}
        models[variant].zero_grad(set_to_none=True)
        resident = sum(t.nbytes for t in (*models[variant].parameters(), *models[variant].buffers(), x))
        above, _ = peak_above_entry(
            lambda one=models[variant]: loss_of(one(x)).backward(), torch.device("cpu")
        )
        each = least[variant] / eager
        spread = ((args.every - 1) * least["plain plan"] + least[variant]) / args.every / eager
        print(
            f"  {variant:24} every step {each:.3f}, every {args.every}th {spread:.3f} (beyond the plan's own "
            f"{spread / own:.3f}), factors {show_bytes(sum(packed.values()))}, peak "
            f"{show_bytes(planning.plan.peak)}, measured ÷ planned peak {(resident + above) / planning.plan.peak:.4f}"
        )


def main() -> None:
    """Measure each named model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["resnet50", "gpt"])
    sizes = {"batch": 8, "image": 224, "width": 64, "blocks": 6, "places": 512, "every": 10, "rounds": 5}
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--budget", default="64GiB")
    parser.add_argument("--fisher", default="mc")
    parser.add_argument("--costs", default="profile")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument(
        "--share-of-peak", type=float, default=0.0, help="budget of the steps with statistics"
    )
    args = parser.parse_args()
    for name in args.names:
        measure(name, args)


if __name__ == "__main__":
    main()
