"""Compare the factors of planned steps with those of curvlinops, in float64: an independent implementation.

usage: pip install curvlinops-for-pytorch; python benchmarks/curvlinops_factors.py

It is no dependency of the tests, since it needs torchvision; they compare with derivatives of each layer by autograd. A
line for each network and form of the factors: the largest relative error of A and G over all layers, and how many ops
each of the plans ran again.
"""

from __future__ import annotations

import copy

import torch
from curvlinops import KFACLinearOperator
from torch import Tensor, nn

import rematplan
from rematplan.ir import InfeasibleBudget

ROUNDING = 1e-18  # of sums whose exact value is zero
BUDGETS = ("100%", "90%", "70%", "50%", "min")


class Sequence(nn.Module):
    """A network for sequences (N, T, ``width``): attention with separate projections, a feed-forward block, and 5
    scores."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.head = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Linear(width, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (samples, 5, tokens) for sequences (samples, tokens, width)."""
        scores = (self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out(scores @ self.v(x))
        return self.head(x + self.down(nn.functional.gelu(self.up(x)))).mT


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return small networks, each with a batch of inputs, by name."""
    torch.manual_seed(0)
    layers = (m for _ in range(4) for m in (nn.Linear(20, 20), nn.Tanh()))
    mlp = nn.Sequential(*layers, nn.Linear(20, 5))
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 8, 3, stride=2, bias=False),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 7 * 7, 5),
    )
    return {
        "mlp": (mlp, torch.randn(800, 20)),
        "cnn": (cnn, torch.randn(32, 3, 16, 16)),
        "sequence": (Sequence(), torch.randn(40, 24, 16)),
    }


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative L2 distance of ``found`` from ``wanted``.

    A tensor that is zero by symmetry (a sum of gradients of attention keys) contains only rounding errors; its norm
    counts as at least `ROUNDING`.
    """
    return float((found - wanted).norm() / max(float(wanted.norm()), ROUNDING))


def compare(name: str, model: nn.Module, x: Tensor, approx: str, reduction: str) -> None:
    """Compare the Kronecker factors of a network with curvlinops' at several budgets, and print a line.

    The line has the largest relative errors of A (inputs) and G (outputs' gradients), and how many ops each plan runs
    again.
    """
    labels = model(x)[:, 0]
    y = (torch.arange(labels.numel()) % 5).view(labels.shape)
    loss = nn.CrossEntropyLoss(reduction=reduction)
    theirs = KFACLinearOperator(
        model,
        loss,
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        kfac_approx=approx,
        num_per_example_loss_terms=y.numel() // len(x),
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    theirs.compute_kronecker_factors()
    reruns, largest = [], [0.0, 0.0]
    for budget in BUDGETS:
        options = {"approx": approx, "loss_reduction": reduction, "class_dim": 1}
        try:
            planned = rematplan.plan_module(
                copy.deepcopy(model),
                (x,),
                budget=budget,
                strategy="approx_dp",
                costs="roofline",
                statistics=rematplan.Kronecker(fisher="empirical", **options),
            )
        except InfeasibleBudget:
            continue
        loss(planned(x), y).backward()
        reruns.append(rematplan.planning(planned).plan.estimate.reruns)
        found = rematplan.planning(planned).statistics().factors
        for layer, a in theirs._input_covariances.items():
            own, g = found[f"{layer}.weight"], theirs._gradient_covariances[layer]
            scale = own.samples if reduction == "mean" else 1
            errors = error(own.a / own.rows, a), error(own.g / scale, g)
            largest = list(map(max, largest, errors))
    print(
        f"{name:9} {approx:7} {reduction:5} A {largest[0]:.1e}  G {largest[1]:.1e}  ops run again {reruns}",
        flush=True,
    )


def main() -> None:
    """Compare all networks, with both forms of the factors and both reductions of the loss."""
    torch.set_default_dtype(torch.float64)
    for name, (model, x) in networks().items():
        for approx in ("expand", "reduce"):
            for reduction in ("mean", "sum"):
                compare(name, model, x, approx, reduction)


if __name__ == "__main__":
    main()
