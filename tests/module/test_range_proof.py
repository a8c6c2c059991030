"""A step's plans are proven at every size of a range, in agreement with captures of each size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import rematplan
from rematplan.ir import UnfitSizes, UsageError
from rematplan.module import size_range_proof
from rematplan.module.size_range_proof import prove_step
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.simulator import simulate
from rematplan.plans.options import PlanOptions
from rematplan.plans.planner import Planner
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.graph.captured_step import CapturedStep

SIZES = range(2, 22)


class Layers(nn.Module):
    """Layers of attention; the bytes of scores are quadratic in the number of tokens."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Its loss for x (batch, tokens, 8)."""
        for layer in self.layers:
            x = x + torch.softmax(layer(x) @ x.mT, -1) @ x.tanh()
        return x.pow(2).mean()


@cache
def step_at(tokens: int) -> CapturedStep:
    return capture(Layers(), (torch.zeros(4, tokens, 8),), "layers")


class Steps:
    """The step at each size; it notes which sizes were asked for."""

    def __init__(self) -> None:
        self.asked = set[int]()

    def __call__(self, tokens: int) -> CapturedStep:
        self.asked.add(tokens)
        return step_at(tokens)


def planner(budget: str) -> Planner:
    return Planner(
        PlanOptions(
            budget=budget,
            costs="roofline",
            loss_memory=0,
            refine=False,
            strategy=rematplan.Auto(time_limit=0.1),
        )
    )


def test_a_proof_holds_at_sizes_that_were_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, one = Steps(), planner("70% of activations")
    one.plan(steps(SIZES[-1]))

    def no_search(*_, **__):
        raise AssertionError("the plan of the largest size fits below")

    monkeypatch.setattr(Auto, "plan", no_search)
    steps.asked = set()
    found = prove_step(one, "tokens", SIZES, steps)
    assert found.proof.holds
    assert [row.size for row in found.proof.rows] == list(SIZES)
    assert steps.asked == found.captured
    assert len(steps.asked) < len(SIZES) - 10
    for row in found.proof.rows[4::9]:
        graph = one.problem(one.with_inverses(steps(row.size)))
        family = one.store.family(graph)
        estimate = simulate(graph, family.plan(graph, row.member).schedule)
        assert (estimate.peak, estimate.reruns) == (row.estimate.peak, row.estimate.reruns)
        assert estimate.peak <= found.proof.budget


def test_where_nothing_fits_it_is_searched_and_sizes_are_named() -> None:
    steps = Steps()
    one = planner("60% of activations")
    one.plan(steps(6))  # whose bytes are far too few for the largest
    found = prove_step(one, "tokens", SIZES, steps)
    assert found.proof.unfit == tuple(range(found.proof.unfit[0], SIZES[-1] + 1))
    assert found.proof.unfit[0] > 6
    assert SIZES[-1] in found.proven
    plan = one.plan(steps(found.proof.unfit[0] - 1)).plan
    assert plan.peak <= found.proof.budget == plan.budget


def test_the_least_budget_is_no_range_s() -> None:
    with pytest.raises(UsageError, match="min differs from size to size"):
        prove_step(planner("min"), "tokens", SIZES, Steps())


RANGES = {"x": {1: Dim("tokens", min=1, max=20)}}


def module(**more: Any) -> nn.Module:
    given = {
        "budget": "70% of activations",
        "costs": "roofline",
        "loss_memory": 0,
        "refine": False,
        "strategy": Auto(time_limit=0.1),
    }
    return rematplan.plan_module(
        Layers(), (torch.zeros(4, 20, 8),), dynamic_shapes=RANGES, **{**given, **more}
    )


def test_a_module_with_ranges_is_proven_with_few_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs, prove = [], size_range_proof.prove_step

    def noted(*args: Any) -> Any:
        proofs.append(prove(*args))
        return proofs[-1]

    monkeypatch.setattr(size_range_proof, "prove_step", noted)
    planned = module()
    (proof,) = proofs
    assert [row.size for row in proof.proof.rows] == list(range(2, 21))
    assert proof.proof.holds
    stats = rematplan.planning(planned).stats()
    assert (stats.captures, stats.open_captures) == (1, 1)
    for tokens in (13, 7):
        planned(torch.ones(4, tokens, 8)).backward()
        assert planned.plan.peak <= planned.plan.budget == proof.proof.budget


class Padded(Layers):
    """The same for sequences with a mask, which has no effect if no word is padding."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Its loss."""
        return super().forward(x) if mask.all() else super().forward(x * mask[..., None])


def test_a_padded_mask_is_padded_at_all_sizes_that_are_planned_first() -> None:
    mask = torch.ones(4, 20, dtype=torch.bool)
    mask[0, -3:] = False
    tokens = Dim("tokens", min=2, max=50)
    ranges = {name: {1: tokens} for name in ("x", "mask")}
    options: dict[str, Any] = {"budget": "1GiB", "costs": "roofline", "refine": False}
    planned = rematplan.plan_module(
        Padded(layers=1), (torch.ones(4, 20, 8), mask), dynamic_shapes=ranges, strategy="store_all", **options
    )
    stats = rematplan.planning(planned).stats()
    assert (stats.captures, stats.open_captures) == (1, 1)


def test_few_sizes_are_all_planned_before_training() -> None:
    ranges = {"x": {0: Dim("rows", min=1, max=4), 1: 4 * Dim("fours", min=1, max=4)}}
    options: dict[str, Any] = {
        "budget": "1GiB",
        "strategy": "store_all",
        "costs": "roofline",
        "refine": False,
    }
    planned = rematplan.plan_module(Layers(1), (torch.zeros(4, 16, 8),), dynamic_shapes=ranges, **options)
    before = rematplan.planning(planned).stats()
    assert (before.plans, before.captures, before.open_captures) == (12, 1, 1)
    for tokens in (4, 8, 12, 16):
        planned(torch.ones(3, tokens, 8)).backward()
        planned.zero_grad()
    assert rematplan.planning(planned).stats().instances == before.instances


@pytest.mark.parametrize("reaction", [None, "raise", "least"])
def test_sizes_without_a_plan_are_an_error_or_a_warning(
    monkeypatch: pytest.MonkeyPatch, reaction: str | None
) -> None:
    prove = size_range_proof.prove_step

    def unfit(*args: Any) -> Any:
        found = prove(*args)
        rows = tuple(replace(row, fits=row.size not in (5, 6)) for row in found.proof.rows)
        return replace(found, proof=replace(found.proof, rows=rows))

    monkeypatch.setattr(size_range_proof, "prove_step", unfit)
    message = "tokens = 5..6 .2 of 19 sizes"
    if reaction == "least":
        with pytest.warns(UserWarning, match=message):
            module(on_infeasible=reaction)
    else:
        with pytest.raises(UnfitSizes, match=message):
            module(on_infeasible=reaction)


def test_a_proof_that_would_need_each_step_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_range_proof, "MOST_STEPS", 3)
    with pytest.warns(UserWarning, match="at every size of tokens from 2 to 20 is not proven"):
        module()


@pytest.mark.parametrize("more", [{"reserved": ["gradients"]}, {"budget": "min"}, {"inverses": True}])
def test_what_is_not_proven_is_not_tried(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    monkeypatch.setattr(size_range_proof, "prove_step", None)
    module(**more)


class Two(Layers):
    """The same for two inputs of different lengths."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Their losses."""
        return super().forward(x) + super().forward(y)


def product(monkeypatch: pytest.MonkeyPatch, model: nn.Module, ranges: Any, *shapes: Any) -> list[Any]:
    """The proofs of a module with these ranges."""
    proofs, prove = [], size_range_proof.prove_step

    def noted(planner: Planner, name: str, *args: Any) -> Any:
        proofs.append((name, prove(planner, name, *args)))
        return proofs[-1][1]

    monkeypatch.setattr(size_range_proof, "prove_step", noted)
    given = {"budget": "70% of activations", "costs": "roofline", "loss_memory": 0, "refine": False}
    inputs = tuple(torch.zeros(*shape, 8) for shape in shapes)
    rematplan.plan_module(
        model, inputs, dynamic_shapes=ranges, strategy=rematplan.Auto(time_limit=0.1), **given
    )
    return proofs


def test_each_combination_of_two_sizes_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"x": {0: Dim("rows", min=1, max=4), 1: Dim("tokens", min=2, max=16)}}
    proofs = product(monkeypatch, Layers(), ranges, (4, 16))
    assert [name for name, _ in proofs] == [f"tokens with rows = {rows}" for rows in (4, 3, 2)]
    assert all(proof.proof.holds and len(proof.proof.rows) == 15 for _, proof in proofs)
    assert len({proof.proof.budget for _, proof in proofs}) == 1


class Quartered(Layers):
    """The same plus the means of four neighbours each, for numbers of tokens that are multiples of 4."""

    def forward(self, x: Tensor) -> Tensor:
        """Its loss."""
        return super().forward(x + x.unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1))


def test_sizes_at_a_distance_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    quarters = Dim("quarters", min=0, max=6)
    proofs = product(monkeypatch, Quartered(), {"x": {1: 4 * quarters}}, (2, 4))
    (_, proof), *more = proofs
    assert not more
    assert [row.size for row in proof.proof.rows] == list(range(1, 7))
    assert proof.proof.holds


class Square(nn.Module):
    """Convolutions and coarser copies, for images whose sides are multiples of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Its loss for x (batch, side, side, 8)."""
        x = x.permute(0, 3, 1, 2)
        for layer in self.layers:
            x = layer(x).tanh().sin()
        return (x + F.interpolate(F.avg_pool2d(x, 4), scale_factor=4.0)).pow(2).mean()


def test_dimensions_of_equal_size_vary_together(monkeypatch: pytest.MonkeyPatch) -> None:
    quarter = Dim("quarter", min=1, max=6)
    (name, proof), *more = product(monkeypatch, Square(), {"x": {1: 4 * quarter, 2: 4 * quarter}}, (2, 8, 8))
    assert not more
    assert name == "quarter"
    assert [row.size for row in proof.proof.rows] == list(range(1, 7))
    assert proof.proof.holds


def test_sizes_of_two_inputs_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"x": {1: Dim("first", min=8, max=12)}, "y": {1: Dim("second", min=2, max=16)}}
    proofs = product(monkeypatch, Two(layers=1), ranges, (2, 12), (2, 16))
    assert [len(proof.proof.rows) for _, proof in proofs] == [15] * 5


def test_too_many_combinations_are_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_range_proof, "MOST_LINES", 4)
    ranges = {"x": {1: Dim("first", min=8, max=12)}, "y": {1: Dim("second", min=2, max=16)}}
    with pytest.warns(UserWarning, match="75 combinations of sizes, only.* at most 4 .*of 5"):
        proofs = product(monkeypatch, Two(layers=1), ranges, (2, 12), (2, 16))
    assert [len(proof.proof.rows) for _, proof in proofs] == [5, 15]
