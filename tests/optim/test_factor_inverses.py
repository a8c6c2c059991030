"""Each form of inverse of a damped factor equals dense algebra, as far as it promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rematplan.optim import factor
from rematplan.optim.damped_inverses import (
    INVERSES,
    cholesky,
    diagonal,
    inverse_bytes,
    low_rank,
    restored,
    saved,
)
from rematplan.optim.factor import Factor
from rematplan.optim.nystrom import nystrom
from rematplan.runtime.statistics.packing import pack, packed_size, packed_trace, unpack

F64 = torch.float64


def spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix of these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=F64)).Q
    return q @ torch.diag(values.to(F64)) @ q.mT


def damped_inverse(matrix: Tensor, damping: float) -> Tensor:
    return torch.linalg.inv(matrix + damping * torch.eye(len(matrix), dtype=F64))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 90), st.lists(st.integers(1, 3), max_size=2))
def test_packing_keeps_every_number_once(n: int, blocks: list[int]) -> None:
    matrix = torch.randn(*blocks, n, n, dtype=F64)
    matrix = matrix + matrix.mT
    packed = pack(matrix)
    assert packed.shape == (*blocks, packed_size(n))
    assert torch.equal(unpack(packed, n), matrix)
    torch.testing.assert_close(packed_trace(packed, n), matrix.diagonal(dim1=-2, dim2=-1).sum(-1))


@pytest.mark.parametrize("name", ["cholesky", "eigen"])
def test_exact_inverses_are_exact(name: str) -> None:
    matrix = spectrum(torch.logspace(0, -6, 40))
    got = INVERSES[name](matrix, 1e-3, None).apply(torch.eye(40, dtype=F64))
    torch.testing.assert_close(got, damped_inverse(matrix, 1e-3), rtol=1e-10, atol=1e-10)


def test_blocks_are_inverted_one_by_one() -> None:
    blocks = torch.stack([spectrum(torch.logspace(0, -2, 16), seed) for seed in range(3)])
    x = torch.randn(3, 16, 2, dtype=F64)
    for name in ("cholesky", "eigen", "low-rank"):
        got = INVERSES[name](blocks, 0.1, None).apply(x)
        for at in range(3):
            alone = INVERSES[name](blocks[at], 0.1, None).apply(x[at])
            torch.testing.assert_close(got[at], alone, rtol=1e-8, atol=1e-8)


def test_a_factor_of_low_rank_has_an_exact_low_rank_inverse() -> None:
    matrix = spectrum(torch.cat((torch.linspace(2, 1, 8), torch.full((56,), 0.01))))
    got = low_rank(matrix, 0.1)
    again = low_rank(matrix, 0.1, got)
    exact = damped_inverse(matrix, 0.1)
    first, second = ((i.apply(torch.eye(64, dtype=F64)) - exact).norm() / exact.norm() for i in (got, again))
    assert second < first < 0.1
    assert second < 1e-3


def test_the_tail_is_the_mean_discarded_eigenvalue() -> None:
    values = torch.cat((torch.full((8,), 5.0), torch.full((56,), 0.3)))
    got = low_rank(spectrum(values), 0.1, low_rank(spectrum(values), 0.1))
    assert got.rest.item() == pytest.approx(1 / (0.3 + 0.1), rel=0.03)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 5), st.integers(1, 8))
def test_nystrom_finds_the_eigenvalues_of_a_matrix_of_low_rank(rank: int, wanted: int) -> None:
    values = torch.zeros(24)
    values[:rank] = torch.linspace(3, 1, rank)
    found, basis = nystrom(spectrum(values), wanted)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(wanted, dtype=F64), rtol=0, atol=1e-8)
    if wanted >= rank:
        torch.testing.assert_close(found, values[:wanted].to(F64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("entry", [1e-30, 1.0, 1e25])
def test_indefinite_by_rounding_is_damped_until_definite(entry: float) -> None:
    x = torch.randn(1, 50)
    factor = entry * x.mT @ x
    inverse = cholesky(factor, 1e-12 * entry)
    assert inverse.matrix.isfinite().all()


def test_diagonal_is_that_of_the_diagonal() -> None:
    got = diagonal(torch.tensor([1.0, 0.0, 3.0]), 1.0).apply(torch.ones(3, 1))
    assert torch.equal(got[:, 0], torch.tensor([0.5, 1.0, 0.25]))


@pytest.mark.parametrize("name", INVERSES)
def test_inverses_survive_being_saved(name: str) -> None:
    matrix = torch.eye(600, dtype=F64) + 0.01 * spectrum(torch.rand(600))
    inverse = INVERSES[name](matrix.diagonal() if name == "diagonal" else matrix, 0.1, None)
    x = torch.randn(600, 2, dtype=F64)
    assert torch.equal(restored(saved(inverse), x.device).apply(x), inverse.apply(x))
    assert inverse_bytes(inverse) > 0


def automatic(values: Tensor, monkeypatch: pytest.MonkeyPatch) -> Factor:
    monkeypatch.setattr(factor, "LOW_RANK_FROM", 64)
    monkeypatch.setattr(factor, "DIAGONAL_ABOVE", 200)
    made = Factor(len(values), (), "auto", F64)
    made.fold(made.kept(spectrum(values)), 1.0, 0.9)
    made.invert(0.1)
    return made


def test_auto_is_low_rank_where_few_eigenvalues_exceed_the_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    few = automatic(torch.cat((torch.linspace(3, 2, 6), torch.full((122,), 0.01))), monkeypatch)
    assert (few.inverse.kind, few.rank, few.effective_rank(0.1)) == ("spectral", 6, 6)


def test_auto_is_dense_where_many_do_and_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    many = automatic(torch.linspace(3, 0, 128), monkeypatch)
    assert many.inverse.kind == "dense"
    assert many.rank > 8
    many.total, many.count = pack(spectrum(torch.eye(128)[0])), 1.0
    kinds = []
    for _ in range(factor.MEASURE_EVERY):
        many.invert(0.1)
        kinds.append(many.inverse.kind)
    assert kinds == ["dense"] * (factor.MEASURE_EVERY - 1) + ["spectral"]


def test_auto_is_dense_where_a_factor_is_small_and_diagonal_where_it_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert automatic(torch.eye(32)[0], monkeypatch).inverse.kind == "dense"
    large = automatic(torch.ones(256), monkeypatch)
    assert large.inverse.kind == "diagonal"
    assert large.total.shape == (256,)


def test_a_vector_is_taken_for_a_diagonal() -> None:
    vector = Factor(5, (), "cholesky", F64, vector=True)
    vector.fold(vector.kept(torch.arange(5.0)), 2.0, 0.9)
    vector.invert(1.0)
    assert torch.equal(vector.inverse.scales, 1 / (torch.arange(5, dtype=F64) / 2 + 1))
