"""Sums of outer products equal those of explicit rows, whichever way they are computed."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rematplan.runtime.statistics import shifts
from rematplan.runtime.statistics.gram import Gram
from rematplan.runtime.statistics.packing import diagonal_blocks, pack, unpack
from rematplan.runtime.statistics.reading import Patches, Rows
from rematplan.runtime.statistics.shifts import Shifts

F64 = torch.float64
PROFILE = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def windows(draw: st.DrawFn, strided: bool) -> tuple[Patches, Tensor]:
    """How a convolution reads its input, and an input."""
    n, groups, per = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, stride, dilation, spread, padding, positions, sizes = ([] for _ in range(7))
    flipped = draw(st.booleans())
    for _ in range(n):
        k, s, d, wide = (draw(st.integers(1, most)) for most in (3, 2 * strided or 1, 2, 2 * strided or 1))
        s, wide = (1, wide) if flipped else (s, 1)
        size, before, after = draw(st.integers(1, 5)), draw(st.integers(-1, 3)), draw(st.integers(-1, 3))
        reach = (size - 1) * wide + 1 + before + after
        count = (reach - d * (k - 1) - 1) // s + 1
        assume(count > 0 and before > -size and after > -size)
        after -= reach - ((count - 1) * s + d * (k - 1) + 1)
        for at, value in zip(
            (kernel, stride, dilation, spread, padding, positions, sizes),
            (k, s, d, wide, (before, after), count, size),
            strict=True,
        ):
            at.append(value)
    batch, channels = 2 * per, groups * draw(st.integers(1, 3))
    read = Patches(
        batch, channels, groups, *map(tuple, (kernel, stride, dilation, padding, spread)), flipped,
        tuple(positions), per,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    x = torch.randn(batch, channels, *sizes, generator=generator, dtype=F64)
    return read, x.transpose(1, -1).contiguous().transpose(1, -1) if draw(st.booleans()) else x


def explicit(read: Patches, x: Tensor, ones: bool) -> Tensor:
    rows = read(x).flatten(1, 1 + len(read.kernel)).flatten(2)
    if ones:
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    return rows @ rows.mT


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12 * max(1.0, float(wanted.abs().max())))


@PROFILE
@given(windows(strided=False), st.booleans(), st.booleans())
def test_products_of_shifted_inputs_are_those_of_windows(
    made: tuple[Patches, Tensor], ones: bool, again: bool
) -> None:
    read, x = made
    gram = Gram(read, "each", 1.0, ones, 0.5)
    own = Shifts(read)
    assert own.sizes == tuple(x.shape[2:])
    out = x.new_ones(gram.shape) if again else x.new_zeros(gram.shape)
    before = unpack(out, read.sizes[1], ones)
    gram._add_by_shifts(own, out, x, F64)
    close(unpack(out, read.sizes[1], ones), before + 0.5 * explicit(read, x, ones))


@PROFILE
@given(windows(strided=True), st.booleans())
def test_sums_of_windows_need_no_windows(made: tuple[Patches, Tensor], mean: bool) -> None:
    read, x = made
    places = tuple(range(2 + len(read.kernel), read(x).dim()))[1:]
    close(read.sums(x, F64), read(x).sum(places))
    gram = Gram(read, "mean" if mean else "sum", 1.0, True, 1.0)
    rows = (read(x).mean(places) if mean else read(x).sum(places)).flatten(1, 1 + len(read.kernel))
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    close(unpack(gram(x), read.sizes[1], True), rows @ rows.mT)


@PROFILE
@given(windows(strided=True), st.booleans())
def test_any_convolution_is_summed_over_its_windows(made: tuple[Patches, Tensor], ones: bool) -> None:
    read, x = made
    gram = Gram(read, "each", 1.0, ones, 1.0)
    close(unpack(gram(x), read.sizes[1], ones), explicit(read, x, ones))
    assert gram.rows(F64) == len(x) * math.prod(read.positions)


@pytest.mark.parametrize("size", [24, 7])
def test_shifts_are_used_where_they_are_fewer(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Patches(
        2, 64, 2, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)), (1, 1), False, (size, size)
    )  # fmt: skip
    x = torch.randn(2, 64, size, size, dtype=F64)
    gram = Gram(read, "each", 1.0, True, 1.0)
    assert ("by shifts" in str(gram)) is (size == 24)
    close(unpack(gram(x), read.sizes[1], True), explicit(read, x, True))
    narrow = gram(x.bfloat16())
    assert narrow.dtype == torch.float32
    shifts.shifts_of.cache_clear()
    monkeypatch.setattr(shifts, "LEAST_CHANNELS", 1000)
    assert "by rows" in str(gram)
    torch.testing.assert_close(gram(x.bfloat16()), narrow, rtol=1e-4, atol=1e-2)
    shifts.shifts_of.cache_clear()


@pytest.mark.parametrize("places", [3, 300])
def test_samples_that_are_matrices_are_read_without_a_copy(places: int) -> None:
    read = Rows((4, 2, 5, places), (1,), (2,), (0,), (3,))
    x = torch.randn(4, 2, 5, places, dtype=F64)
    gram = Gram(read, "each", 1.0, False, 1.0)
    rows = x.permute(1, 2, 0, 3).flatten(2)
    close(unpack(gram(x), 5), rows @ rows.mT)
    assert len(list(gram._chunks(F64))) == (4 if places == 300 else 1)


@pytest.mark.parametrize(("rows", "count"), [(6, 3), (150, 3), (1100, 2), (1040, 260)])
def test_diagonal_blocks_are_read_without_the_dense_matrix(rows: int, count: int) -> None:
    some = torch.randn(rows, 7, dtype=torch.float64)
    dense = some @ some.mT
    size = rows // count
    expected = [dense[at * size : (at + 1) * size, at * size : (at + 1) * size] for at in range(count)]
    close(diagonal_blocks(pack(dense), rows, count), torch.stack(expected))
