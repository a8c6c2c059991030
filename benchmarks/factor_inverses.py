"""Compare methods of inverting real Kronecker factors: time, memory, and direction of the preconditioned gradient.

    python benchmarks/factor_inverses.py --sizes 512,1024,2048 --steps 60

A network with two wide layers is trained on scikit-learn's 1,797 digits. Then the factors A and G of its square
layer, and the layer's gradient, are taken for one batch of all digits. Each form of the damped inverse is compared
with the exact one in float64 by the cosine of the two preconditioned gradients, of some of the gradient's columns. The
damping is a share of the factor's mean eigenvalue. One thread is used. 8,192 rows take ten minutes; ``--forms`` selects
rows of the table by the start of their name.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import hodlr
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.optim.damped_inverses import (
    Inverse,
    Spectral,
    cholesky,
    diagonal,
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


def factors(size: int, steps: int, rows: int, columns: int) -> Iterator[Factor]:
    """Train a network for ``steps`` steps of ``rows`` digits, and yield the factors A and G of its square layer of
    ``size`` features, each with ``columns`` columns of the layer's gradient."""
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        some = torch.randint(len(x), (rows,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    planned = rematplan.plan_module(
        model,
        (x,),
        budget="300%",
        strategy="store_all",
        costs="roofline",
        statistics=rematplan.Kronecker(fisher="mc"),
    )
    optimizer.zero_grad()
    functional.cross_entropy(planned(x), y).backward()
    statistics = rematplan.planning(planned).statistics().factors["2.weight"]
    gradient = statistics.matrix(planned[2].weight.grad, planned[2].bias.grad)
    yield Factor("A", statistics.a / statistics.rows, gradient[:columns].mT.contiguous())
    yield Factor("G", statistics.g / statistics.samples, gradient[:, :columns].contiguous())


Make = Callable[[float], Inverse]
"""Makes the inverse of a matrix for a damping."""


def spectral(matrix: Tensor) -> Make:
    """Return a `Make` from all eigenvectors of a matrix, and print how many eigenvalues are above each damping."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(0)
    above = [int((values > damping * values.mean()).sum()) for damping in DAMPINGS]
    print(f"eigenvalues above these dampings: {above}")
    return lambda damping: Spectral(vectors, 1 / (values + damping), values.new_zeros(()))


def by_rank(share: int) -> Callable[[Tensor], Make]:
    """Return a function from a matrix of n rows to a `Make` of low-rank inverses with n ÷ ``share`` eigenvectors."""

    def form(matrix: Tensor) -> Make:
        values, basis = nystrom(matrix, len(matrix) // share)
        return lambda damping: low_rank_inverse(matrix, values, basis, damping)

    return form


def by_levels(rank: int) -> Callable[[Tensor], Make]:
    """Return a function from a matrix to a `Make` of hierarchical inverses whose off-diagonal blocks have rank
    ``rank``."""
    return lambda matrix: lambda damping: hodlr.Hierarchical(*hodlr.inverse(matrix, damping, rank))


FORMS: dict[str, Callable[[Tensor], Make]] = {
    "Cholesky": lambda matrix: lambda damping: cholesky(matrix, damping),
    "eigen": spectral,
    **{f"low rank n/{share}": by_rank(share) for share in SHARES},
    **{f"hierarchical, rank {rank}": by_levels(rank) for rank in RANKS},
    "diagonal": lambda matrix: lambda damping: diagonal(matrix.diagonal(), damping),
}


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors."""
    return float(functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def measured(factor: Factor, form: str, exact: dict[float, Tensor]) -> str:
    """Return a row of the table: seconds, bytes ÷ the factor's, and the cosine with the exact result for each damping.

    ``form``: a key of `FORMS`. ``exact``: for each damping, the gradient multiplied by the exact inverse. The seconds
    are those of one inverse; those for more dampings of the same factor take less, if they use the same eigenvectors.
    """
    cells, seconds, share = [], 0.0, 0.0
    began = time.process_time()
    make = FORMS[form](factor.matrix)
    prepared = time.process_time() - began
    for damping in DAMPINGS:
        began = time.process_time()
        try:
            inverse = make(damping * factor.mean)
        except hodlr.NotDefinite:
            cells.append(" indef.")
            continue
        seconds = prepared + time.process_time() - began
        share = inverse_bytes(inverse) / factor.matrix.nbytes
        cells.append(f"{cosine(inverse.apply(factor.gradient), exact[damping]):7.4f}")
    return f"{form:22} {seconds:9.4f} {share:8.3f}  " + " ".join(cells)


def exact_products(factor: Factor) -> dict[float, Tensor]:
    """Return, for each damping, the factor's gradient multiplied by the exact inverse, in float64."""
    found, wide = {}, factor.matrix.double()
    for damping in DAMPINGS:
        damped = wide.clone()
        damped.diagonal().add_(damping * factor.mean)
        found[damping] = torch.cholesky_solve(factor.gradient.double(), torch.linalg.cholesky(damped))
    return found


def main() -> None:
    """Print the table for each size of layer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="512,1024,2048")
    parser.add_argument("--steps", type=int, default=60, help="of training before the factors are taken")
    parser.add_argument("--rows", type=int, default=256, help="digits in a training step")
    parser.add_argument("--columns", type=int, default=512, help="columns of the gradient that are compared")
    parser.add_argument("--forms", default="", help="starts of the names of forms to measure; default: all")
    args = parser.parse_args()
    forms = [form for form in FORMS if form.startswith(tuple(args.forms.split(",")))]
    torch.set_num_threads(1)
    for size in map(int, args.sizes.split(",")):
        for factor in factors(size, args.steps, args.rows, args.columns):
            exact = exact_products(factor)
            print(f"\n{factor.name}, {len(factor.matrix)} rows")
            print(f"{'':22} {'seconds':>9} {'memory':>8}   cosine at λ = " + ", ".join(map(str, DAMPINGS)))
            for form in forms:
                print(measured(factor, form, exact), flush=True)


if __name__ == "__main__":
    main()
