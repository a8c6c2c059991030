"""Laws of the test of rows: it finds the kernels whose rows depend on their number, and each is tested once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_steps import verify
from split_models import CASES, Decoder, captured, planned, split, split_weights, tokens
from torch import Tensor, nn
from torch.nn import functional

from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.split import row_bits
from rematplan.runtime.split.regions import SplitRegion
from rematplan.runtime.split.row_bits import changed_rows
from rematplan.runtime.split.split_step import split_regions

ATEN = torch.ops.aten


def changed(step: CapturedStep, regions: tuple[SplitRegion, ...], k: int, cache: Path) -> set[Any]:
    """The ops that are found to change rows in ``k`` parts."""
    parts = dict.fromkeys(regions, k)
    return {step.call[name].target for name in changed_rows(step, split_regions(step, parts), parts, cache)}


class Stem(nn.Module):
    """A convolution, for which CPUs have another kernel if there is one small image only."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).tanh()).square().mean()


@pytest.mark.parametrize("rows", [24, 45])
@pytest.mark.parametrize("k", [2, 16])
def test_where_no_rows_change_only_sums_do(rows: int, k: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, batch = Decoder(tied=False), tokens(1, rows)
    step, regions = captured(module, batch)
    found = changed(step, regions, k, tmp_path)
    differ = {d.name for d in verify(planned(module, split(step, regions, k)), batch).differences}
    assert found or differ <= split_weights(step, regions)


def test_what_is_said_of_a_product_is_what_it_does(tmp_path: Path) -> None:
    """Products of 1 to 3 rows have a kernel of their own on many CPUs."""
    torch.manual_seed(0)
    module, batch = Decoder(tied=False), tokens(1, 24)
    step, regions = captured(module, batch)
    call = next(c for c in step.calls if c.target is ATEN.addmm.default)
    bias, x, weight = row_bits.SyntheticArguments(step).of(call)[0]
    whole = torch.addmm(bias, x, weight)
    for k in (2, 12):
        parts = dict.fromkeys(regions, k)
        names = changed_rows(step, split_regions(step, parts), parts, tmp_path)
        same = torch.equal(whole, torch.cat([torch.addmm(bias, rows, weight) for rows in x.split(24 // k)]))
        assert (call.name in names) == (not same)


def test_one_image_has_another_kernel_than_two(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Stem(), torch.randn(2, 3, 8, 8)
    step, regions = captured(module, (x,))
    whole, weight = functional.conv2d(x, module.wide.weight, padding=1), module.wide.weight
    alone = torch.cat([functional.conv2d(one, weight, padding=1) for one in x.split(1)])
    assert (ATEN.convolution.default in changed(step, regions, 2, tmp_path)) == (
        not torch.equal(whole, alone)
    )


@pytest.mark.parametrize("op", [ATEN.addmm, ATEN.gelu, ATEN._log_softmax, ATEN.mm])
def test_a_kernel_that_depends_on_the_number_of_rows_is_found(
    op: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list[str]()
    kernel_of = row_bits.kernel_of

    def of(target: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = kernel_of(target)(*args, **kwargs)
            runs.append(str(target))
            return found * (1 + 1e-6 * found.numel()) if target is op.default else found

        return run

    monkeypatch.setattr(row_bits, "kernel_of", of)
    torch.manual_seed(0)
    module, batch = CASES["untied"]()
    step, regions = captured(module, batch)
    assert changed(step, regions, 4, tmp_path) == {op.default}
    first = len(runs)
    assert first > 0
    assert changed(step, regions, 4, tmp_path) == {op.default}
    assert len(runs) == first
    assert changed(step, regions, 2, tmp_path) == {op.default}
    assert len(runs) > first
    wide, shapes = len(runs), tokens(2, 128)
    changed(*captured(module, shapes), 4, tmp_path)
    assert len(runs) > wide


def test_what_cannot_run_counts_as_changed_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    torch.manual_seed(0)
    module, batch = CASES["untied"]()
    step, regions = captured(module, batch)
    with monkeypatch.context() as patch:
        patch.setattr(row_bits, "kernel_of", lambda _: fails)
        assert ATEN.addmm.default in changed(step, regions, 4, tmp_path)
    assert changed(step, regions, 4, tmp_path) == set()
