"""`fit` of models whose images grow, and of sizes beyond this machine's memory."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import rematplan
from rematplan.cli.fit_models import _unit
from rematplan.fitting.fit import answer
from rematplan.fitting.question import SizedModel, WithoutData, question, training
from rematplan.fitting.sizes import SizeSearch
from rematplan.ir import ModelError
from rematplan.planner.core.strategy import silent
from rematplan.report.fit_tables import margin_table
from rematplan.runtime.capture.fake_weights import without_data

ASKED = question("40MB", None, None, "server-cpu", None, rematplan.ExactDP())


def test_kernels_that_need_more_than_the_memory_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(1, 2)).square().mean()

    def fit(size: int) -> rematplan.Fit:
        return rematplan.fit(
            Turned, lambda n: (torch.empty(n, 8, 16),), memory="1GB", size=size, largest=False
        )

    monkeypatch.setattr("rematplan.runtime.capture.patches.fake_layouts.physical_memory", lambda: 1 << 20)
    assert fit(100).fits
    with pytest.raises(ModelError, match="this machine has not so much; state smaller sizes"):
        fit(10_000)


def test_sides_of_images_grow_less_than_their_areas() -> None:
    sides: list[int] = []

    def at(side: int) -> WithoutData:
        sides.append(side)
        made = without_data(
            lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1)),
            lambda: [torch.empty(1, 1, side, side)],
        )
        return training(*made, ASKED, "output")

    found = answer(SizedModel("net", "image", 32, at, 32), ASKED, True).largest
    assert found.without.size < found.impossible
    assert max(sides) < 1.2 * found.impossible


@pytest.mark.parametrize(
    ("name", "size", "unit"),
    [
        ("unet", 192, 32),
        ("timm/vit_small_patch14_dinov2", 518, 14),
        ("timm/vit_large_patch14_clip_336", 336, 28),
        ("timm/mixer_b16_224", 224, 32),
    ],
)
def test_sides_of_images_are_multiples_of_patches(name: str, size: int, unit: int) -> None:
    assert _unit(name, "image", size) == unit
    assert _unit(name, "batch", size) == 1


def test_equal_parts_of_a_margin_are_both_shown() -> None:
    table = margin_table(cast(Any, SimpleNamespace(margin={"one": 1 << 20, "another": 1 << 20})))
    assert table.row_count == 2


def test_parameters_that_grow_with_the_side_are_exact_between_captured_sizes() -> None:
    class Positions(nn.Module):
        def __init__(self, side: int) -> None:
            super().__init__()
            self.layer, self.places = nn.Linear(3, 3), nn.Parameter(torch.empty(side * side, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.flatten(2).mT + self.places).square().mean()

    def at(side: int) -> WithoutData:
        made = without_data(lambda: Positions(side), lambda: [torch.empty(2, 3, side, side)])
        return training(*made, asked, "output")

    asked = question("40MB", "adamw", None, "h100", None)

    def search(*sides: int) -> SizeSearch:
        found = SizeSearch(SizedModel("net", "image", 25, at, 1), asked, silent)
        for side in sides:
            found.captured(side)
        return found

    between, captured = search(25, 57, 71, 104), search(88)
    for found, expected in zip(between.problem(88).tensors, captured.problem(88).tensors, strict=True):
        assert found == expected
    assert [op.workspace for op in between.problem(88).ops] == [
        op.workspace for op in captured.problem(88).ops
    ]
    assert list(between._captured) == [25, 57, 71, 104]
    assert between.base(88).peak == captured.base(88).peak
