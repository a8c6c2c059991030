"""Compare methods of inverting real Kronecker factors: time, memory, and direction of the preconditioned gradient.

    python benchmarks/factor_inverses.py --sizes 512,1024,2048 --steps 60

A network with two wide layers is trained on scikit-learn's 1,797 digits. Then the factors A and G of its square
layer, and the layer's gradient, are taken for one batch of all digits. Each form of the damped inverse is compared
with the exact one in float64 by the cosine of the two preconditioned gradients. The damping is a share of the
factor's mean eigenvalue. One thread is used.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.optim import hodlr
from rematplan.optim.damped_inverses import (
    Hierarchical,
    Inverse,
    cholesky,
    diagonal,
    eigen,
    inverse_bytes,
    low_rank_inverse,
)
from rematplan.optim.nystrom import nystrom

DAMPINGS = (0.1, 0.01, 0.001)
SHARES = (16, 8, 4)
RANKS = (32, 128)


@dataclass(frozen=True)
class Factor:
    """A Kronecker factor of a layer.

    ``name``: A (of the inputs) or G (of the outputs' gradients). ``matrix``: the factor, (n, n), float32. ``gradient``:
    the layer's gradient, (n, columns), which the inverse multiplies.
    """

    name: str
    matrix: Tensor
    gradient: Tensor

    @property
    def mean(self) -> float:
        """The mean eigenvalue of the factor."""
        return float(self.matrix.diagonal().mean())


def factors(size: int, steps: int) -> Iterator[Factor]:
    """Train a network on digits for ``steps`` steps, and yield the factors A and G of its square layer of ``size``
    features."""
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10)
    )
    planned = rematplan.plan_module(
        model,
        (x,),
        budget="300%",
        strategy="store_all",
        costs="roofline",
        statistics=rematplan.Kronecker(every=steps, fisher="mc"),
    )
    optimizer = torch.optim.AdamW(planned.parameters(), lr=1e-3)
    for step in range(steps + 1):
        optimizer.zero_grad()
        functional.cross_entropy(planned(x), y).backward()
        if step < steps:
            optimizer.step()
    statistics = rematplan.planning(planned).statistics().factors["2.weight"]
    gradient = statistics.matrix(planned[2].weight.grad, planned[2].bias.grad)
    yield Factor("A", statistics.a / statistics.rows, gradient.mT.contiguous())
    yield Factor("G", statistics.g / statistics.samples, gradient)


def by_rank(share: int) -> Callable[[Tensor, float], Inverse]:
    """Return a function from (matrix, damping) to a low-rank inverse with n ÷ ``share`` eigenvectors, for n rows."""

    def make(matrix: Tensor, damping: float) -> Inverse:
        return low_rank_inverse(matrix, *nystrom(matrix, len(matrix) // share), damping)

    return make


def by_levels(rank: int) -> Callable[[Tensor, float], Inverse]:
    """Return a function from (matrix, damping) to a hierarchical inverse whose off-diagonal blocks have rank
    ``rank``."""
    return lambda matrix, damping: Hierarchical(*hodlr.inverse(matrix, damping, rank))


FORMS: dict[str, Callable[[Tensor, float], Inverse]] = {
    "Cholesky": cholesky,
    "eigen": eigen,
    **{f"low rank n/{share}": by_rank(share) for share in SHARES},
    **{f"hierarchical, rank {rank}": by_levels(rank) for rank in RANKS},
    "diagonal": lambda matrix, damping: diagonal(matrix.diagonal(), damping),
}


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors."""
    return float(functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def measured(factor: Factor, form: str, exact: dict[float, Tensor]) -> str:
    """Return a row of the table: seconds, bytes ÷ the factor's, and the cosine with the exact result for each damping.

    ``form``: a key of `FORMS`. ``exact``: for each damping, the gradient multiplied by the exact inverse.
    """
    cells, seconds, share = [], 0.0, 0.0
    for damping in DAMPINGS:
        start = time.perf_counter()
        try:
            inverse = FORMS[form](factor.matrix, damping * factor.mean)
        except hodlr.NotDefinite:
            cells.append(" indef.")
            continue
        seconds = time.perf_counter() - start
        share = inverse_bytes(inverse) / factor.matrix.nbytes
        cells.append(f"{cosine(inverse.apply(factor.gradient), exact[damping]):7.4f}")
    return f"{form:22} {seconds:9.4f} {share:8.2f}  " + " ".join(cells)


def main() -> None:
    """Print the table for each size of layer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="512,1024,2048")
    parser.add_argument("--steps", type=int, default=60, help="of training before the factors are taken")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in map(int, args.sizes.split(",")):
        for factor in factors(size, args.steps):
            values = torch.linalg.eigvalsh(factor.matrix.double())
            above = [int((values > damping * factor.mean).sum()) for damping in DAMPINGS]
            print(
                f"\n{factor.name}, {len(factor.matrix)} rows; eigenvalues above {DAMPINGS} of the mean: {above}"
            )
            print(f"{'':22} {'seconds':>9} {'memory':>8}   cosine at λ = " + ", ".join(map(str, DAMPINGS)))
            eye = torch.eye(len(factor.matrix), dtype=torch.float64)
            exact = {
                damping: torch.linalg.solve(
                    factor.matrix.double() + damping * factor.mean * eye, factor.gradient.double()
                )
                for damping in DAMPINGS
            }
            for form in FORMS:
                print(measured(factor, form, exact), flush=True)


if __name__ == "__main__":
    main()
