"""Laws of regions: what a kernel may compute, the order of the fused step, and cuts where the peak would grow.

The kernels here run the ops of their region one after the other, so nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rematplan.module.captures import capture_call
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.execute.compile import compile_halves
from rematplan.runtime.fuse.computed_again import is_cheap
from rematplan.runtime.fuse.fuse import FusedStep, Kernels, fuse
from rematplan.runtime.fuse.kernel import CannotFuse, FusedKernel, RegionOps
from rematplan.runtime.fuse.regions import Region, Regions
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import with_loss_boundary
from rematplan.runtime.problem.planning_problem import training_graph
from rematplan.runtime.split.call_emitter import part_of
from rematplan.runtime.split.regions import find_regions
from rematplan.runtime.split.split_step import split_regions, splittable


class Uncompiled(Kernels):
    """Kernels that run the ops of a region, with a stated workspace. Regions with some ops cannot be compiled."""

    def __init__(self, workspace: int = 0, refused: str = "-") -> None:
        super().__init__()
        self.workspace, self.refused = workspace, refused

    def begin(self, step: CapturedStep, regions: Sequence[Region]) -> None:
        pass

    def of(self, step: CapturedStep, region: Region) -> FusedKernel:
        if any(self.refused in name for name in region.names):
            raise CannotFuse("refused")
        ops = RegionOps(step, region)
        return FusedKernel(ops.key, ops, lambda args: ops(*args), self.workspace)


class Block(nn.Module):
    """Norms, views between pointwise ops, halves of a tensor, a residual, dropout, an op in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.wide(self.norm(x)).chunk(2, -1)
        y = (a.sigmoid() * b).transpose(0, 1).add_(1.0).transpose(0, 1)
        return x + functional.dropout(self.back(y), 0.1, self.training)


class Net(nn.Module):
    """Blocks and a loss."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(x)
        return (y.square().mean(-1) - y.amax(-1)).exp().sum()


def captured(model: nn.Module, *batch: Tensor) -> CapturedStep:
    return capture_call(model, batch, {})[1]


def problem(step: CapturedStep) -> Any:
    return with_loss_boundary(step, training_graph(step, {c.name: CallCost(1.0) for c in step.priced_calls}))


@pytest.fixture
def step() -> CapturedStep:
    torch.manual_seed(0)
    return captured(Net(), torch.randn(4, 6, 8))


@pytest.fixture
def fused(step: CapturedStep) -> FusedStep:
    return fuse(step, Uncompiled())


def kernels(step: CapturedStep) -> list[FusedKernel]:
    return [c.target for c in step.calls if isinstance(c.target, FusedKernel)]


def test_fewer_calls_and_equal_layers_share_a_kernel(step: CapturedStep, fused: FusedStep) -> None:
    assert len(fused.step.priced_calls) < 0.8 * len(step.priced_calls)
    found = kernels(fused.step)
    assert len({one.key for one in found}) < len(found)


def test_calls_come_after_those_that_they_read(fused: FusedStep) -> None:
    known = {i.value for i in fused.step.inputs}
    for call in fused.step.calls:
        assert known.issuperset(call.operands)
        known |= {r for r in call.results if r}
    assert {o.value for o in fused.step.outputs} <= known
    halves = [c.backward for c in fused.step.priced_calls]
    assert halves == sorted(halves)


def test_random_ops_keep_their_order_and_are_no_part_of_a_region(
    step: CapturedStep, fused: FusedStep
) -> None:
    assert [c.name for c in fused.step.calls if c.seeded] == [c.name for c in step.calls if c.seeded]
    assert any(c.seeded for c in step.calls)


def test_neither_the_peak_nor_the_largest_need_grows(step: CapturedStep, fused: FusedStep) -> None:
    before, after = problem(step), problem(fused.step)
    assert no_recompute(after).peak <= no_recompute(before).peak


def results(step: CapturedStep, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Run a step without recomputation, and return its loss and gradients."""
    named = {f"model.{name}": t for name, t in (*model.named_parameters(), *model.named_buffers())}
    halves = compile_halves(step, no_recompute(problem(step)).schedule)
    at = {
        "batch": lambda i: batch,
        **dict.fromkeys(("parameter", "buffer"), lambda i: named[i.target].detach()),
    }
    with torch.no_grad():
        (loss, *_), held = halves.forward(*(at[i.kind](i) for i in step.inputs if i.kind in at))
        found, given = {"loss": loss}, [torch.ones(())]
        for segment in halves.backward:
            made, held = segment.function(held, *given)
            found |= {o.target: t for o, t in zip(segment.outputs, made, strict=True)}
            given = []
    return found


def test_the_same_bits_as_the_ops() -> None:
    model, batch = Net().eval(), torch.randn(4, 6, 8)
    whole = captured(model, batch)
    expected, got = results(whole, model, batch), results(fuse(whole, Uncompiled()).step, model, batch)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


class Gated(nn.Module):
    """Root mean square norms and gated units, with a wide head."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(3)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 32 * width)

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in self.layers:
            y = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            x = x + down(functional.silu(gate(y)) * up(y))
        return self.head(x).square().sum()


def test_what_one_region_reads_and_pointwise_siblings_are_parts_of_it() -> None:
    torch.manual_seed(0)
    step = captured(Gated(), torch.randn(4, 6, 8))
    fused = fuse(step, Uncompiled()).step
    late = [c for c in fused.priced_calls if c.backward]
    # Derivatives of squares, and both factors of each product's derivative; the loss is read outside.
    alone = [c for c in late if c.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.pow.Tensor_Scalar)]
    assert len(alone) == 1
    readers = {name: {c.name for c in calls} for name, calls in fused.readers.items()}
    kernels_ = {c.name: c for c in late if isinstance(c.target, FusedKernel)}
    for call in kernels_.values():
        (region,) = [call.target.ops.region]
        only = set().union(*(readers.get(r, set()) for r in call.results if r))
        assert not (len(only) == 1 and only <= kernels_.keys() and all(map(is_cheap, region.calls)))
    assert no_recompute(problem(fused)).peak < no_recompute(problem(step)).peak


def test_a_region_that_needs_more_than_each_op_is_cut(step: CapturedStep) -> None:
    whole = fuse(step, Uncompiled())
    cut = fuse(step, Uncompiled(workspace=10**6))
    assert whole.kernels
    assert not kernels(cut.step)


def test_a_region_at_which_the_peak_would_grow_is_cut() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> Tensor:
            parts = [(x * (self.scale * k)).sin().sum() for k in range(6)]
            return torch.stack(parts).sum()

    step = captured(Chain(), torch.randn(1000))
    found = fuse(step, Uncompiled())
    assert no_recompute(problem(found.step)).peak <= no_recompute(problem(step)).peak


def test_a_region_that_cannot_be_compiled_keeps_its_ops(step: CapturedStep) -> None:
    found = fuse(step, Uncompiled(refused="norm"))
    assert found.failures
    assert found.kernels
    assert any("layer_norm" in str(c.target) for c in found.step.calls)
    assert set(fuse(step, Uncompiled(refused="")).failures) == {"refused"}


def test_what_makes_an_output_is_no_part_of_a_region() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x).relu()
            return y * 2, (y + 1).exp()

    step = captured(Two(), torch.randn(3, 4))
    made = {step.values[o.value].call for o in step.outputs if o.kind == "output"}
    assert made.isdisjoint(name for names in Regions(step).find() for name in names)


def test_regions_are_found_in_the_same_way_in_two_captures() -> None:
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(4, 6, 8)
    keys = [[one.key for one in kernels(fuse(captured(model, batch), Uncompiled()).step)] for _ in range(2)]
    assert keys[0] == keys[1]


def test_ops_that_read_no_tensor_of_the_step_are_no_region() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            waves = torch.arange(48.0).view(6, 8).mul(0.1).sin()
            return (self.linear(x).relu() * waves + 1).square().sum()

    fused = fuse(captured(Positions(), torch.randn(4, 6, 8)), Uncompiled())
    assert kernels(fused.step)
    assert all(kernel.ops.region.inputs for kernel in kernels(fused.step))


class Weighted(nn.Module):
    """Rows of large products between norms over all rows, and a factor from before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.weight = nn.Parameter(torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = (x.unsqueeze(-1) * self.weight).softmax(-1).square().sum(-1)
        return (self.other(y) * x).square().sum()


@pytest.mark.parametrize(("kind", "parts"), [(Net, 2), (Gated, 3)])
def test_each_part_of_split_ops_is_in_regions_of_its_own(kind: type[nn.Module], parts: int) -> None:
    torch.manual_seed(0)
    model, batch = kind().eval(), torch.randn(4, 6, 8)
    step = captured(model, batch)
    split = split_regions(step, dict.fromkeys(splittable(step, find_regions(step)), parts))
    found = fuse(split, Uncompiled())
    numbers = [{part_of(name) for name in region.names} for region in found.kernels]
    assert all(len(own) == 1 for own in numbers)
    assert {*range(parts)} <= set[int | None]().union(*numbers)
    expected, got = results(split, model, batch), results(found.step, model, batch)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_no_region_is_before_and_after_a_part() -> None:
    step = captured(Weighted(), torch.randn(16, 8))
    split = split_regions(step, dict.fromkeys(splittable(step, find_regions(step)), 4))
    found = fuse(split, Uncompiled())
    assert {None, *range(4)} <= {part_of(name) for region in found.kernels for name in region.names}
    assert len(found.step.priced_calls) < len(split.priced_calls)
