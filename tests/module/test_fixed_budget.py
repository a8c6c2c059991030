"""Laws of a percentage as the budget of a planned module: its first plan makes bytes of it, which hold from then on."""

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget

WIDTH, CLASSES = 64, 10
QUICK = {"strategy": "approx_dp", "costs": "roofline", "loss_memory": "3x"}


def network() -> nn.Module:
    """One whose parameters outweigh what a small batch needs beside them."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES))


def rows(n: int) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))


@cache
def planned_once(n: int, budget: str, **more: str) -> nn.Module:
    return rematplan.plan_module(network(), (rows(n),), budget=budget, **QUICK, **more)


def planned_for(n: int, budget: str = "60%", model: nn.Module | None = None, **more: str) -> nn.Module:
    """A model, planned; or a copy of the planned network, with its plan."""
    if model is None:
        return copy.deepcopy(planned_once(n, budget, **more))
    return rematplan.plan_module(model, (rows(n),), budget=budget, **QUICK, **more)


def test_the_last_batch_of_an_epoch_has_the_bytes_of_the_first() -> None:
    planned, plain = planned_for(1024), network()
    first = planned.plan
    with pytest.raises(InfeasibleBudget):  # of its own peak it could not have so little
        planned_for(2)
    for model in (planned, plain):
        torch.manual_seed(0)
        for n in (1024, 1024, 2):
            model.zero_grad()
            functional.cross_entropy(model(rows(n)), torch.arange(n) % CLASSES).backward()
    last = planned.plan
    assert first.estimate.overhead > 0
    assert last is not first
    assert last.budget == first.budget
    assert last.estimate.reruns == 0
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


def test_other_modes_and_states_have_the_bytes_of_the_first() -> None:
    planned = planned_for(1024)
    budget = planned.plan.budget
    planned.eval().prepare(rows(1024))
    planned[:10].requires_grad_(False)
    planned.prepare(rows(1024))
    assert len(planned.plans) == 3
    assert [p.budget for p in planned.plans] == [budget] * 3
    assert planned.plan.estimate.reruns == 0  # frozen layers need less than the budget by themselves


def in_bfloat16(model: nn.Module) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def frozen(model: nn.Module) -> AbstractContextManager[Any]:
    model[:4].requires_grad_(False)
    return nullcontext()


def in_float64(model: nn.Module) -> AbstractContextManager[Any]:
    model.double()
    return nullcontext()


@pytest.mark.parametrize("change", [in_bfloat16, frozen, in_float64])
def test_a_percentage_is_of_the_step_that_trains_first(change: Callable[[nn.Module], Any]) -> None:
    planned, asked = planned_for(1024, model=network()), network()
    before = planned.plan.budget
    dtype = torch.float64 if change is in_float64 else torch.float32
    x = rows(1024).to(dtype)
    with change(asked):
        own = rematplan.plan_module(asked, (x,), budget="60%", **QUICK).plan.budget
    for n in (1024, 2):
        with change(planned):
            y = planned(x[:n])
        functional.cross_entropy(y.to(dtype), torch.arange(n) % CLASSES).backward()
        assert planned.plan.budget == own != before
        planned.zero_grad()
    assert copy.deepcopy(planned).prepare(x[:3]).plan.budget == own
    for _ in range(2):  # of other modes later, too
        with torch.autocast("cpu", torch.bfloat16):
            planned.eval()(x[:4]).sum().backward()
        assert planned.plan.budget == own
        planned.zero_grad()


def test_a_copy_that_trains_first_does_not_fix_the_bytes_of_the_original() -> None:
    planned = planned_for(1024)
    larger = copy.deepcopy(planned)
    own = []
    with in_float64(larger):
        larger(rows(1024).double()).sum().backward()
        own.append(larger.plan.budget)
    with torch.autocast("cpu", torch.bfloat16):
        planned(rows(1024)).float().sum().backward()
        own.append(planned.plan.budget)
    assert own[1] < own[0]


def test_a_percentage_is_of_the_call_that_was_planned_if_the_first_step_has_other_shapes() -> None:
    planned = planned_for(1024)
    before = planned.plan.budget
    for n in (2, 1024):
        with torch.autocast("cpu", torch.bfloat16):
            y = planned(rows(n))
        functional.cross_entropy(y.float(), torch.arange(n) % CLASSES).backward()
        assert planned.plan.budget == before
        planned.zero_grad()


def test_a_larger_batch_is_judged_by_the_same_bytes() -> None:
    planned = planned_for(1024, on_infeasible="raise")
    first = planned.plan
    planned.prepare(rows(1060))
    assert planned.plan.budget == first.budget
    assert planned.plan.peak <= first.budget
    assert planned.plan.estimate.overhead >= first.estimate.overhead
    with pytest.raises(InfeasibleBudget) as refused:
        planned.prepare(rows(8192))
    assert refused.value.budget == first.budget
    assert "the first plan turned 60% into this number of bytes" in str(refused.value)


def test_pickles_have_the_same_bytes() -> None:
    planned = planned_for(1024)
    twin = pickle.loads(pickle.dumps(planned))
    twin.prepare(rows(2))
    assert twin.plan.budget == planned.plan.budget
    assert twin.plan.estimate.reruns == 0


def test_a_module_that_is_planned_again_has_a_new_budget_in_bytes() -> None:
    planned = planned_for(1024)
    again = planned_for(512, model=planned)
    assert again.plan.budget < planned.plan.budget


def test_the_least_is_of_each_shape_by_itself() -> None:
    planned = planned_for(1024, "min")
    large = planned.plan.peak
    planned.prepare(rows(256))
    assert planned.plan.peak < large
    assert planned.plan.estimate.reruns


def test_a_percentage_applies_to_each_graph_of_a_compiler() -> None:
    torch._dynamo.reset()
    backend = rematplan.backend(budget="80%", strategy="approx_dp", costs="roofline")
    for n in (512, 1024):
        torch.compile(network(), backend=backend, dynamic=False)(rows(n))
    small, large = (plan.budget for plan in backend.plans)
    assert small < large


def test_a_share_of_activations_becomes_bytes_too() -> None:
    planned = planned_for(1024, "50% of activations")
    most = planned_for(1024, "100% of activations").plan
    first = planned.plan
    parameters = sum(p.nbytes for p in planned.parameters())
    assert most.estimate.reruns == 0
    assert 2 * parameters < first.budget < most.budget
    assert first.estimate.reruns
    planned.prepare(rows(2))
    assert planned.plan.budget == first.budget
    assert planned.plan.estimate.reruns == 0


def test_a_number_without_a_unit_is_asked_about() -> None:
    with pytest.raises(InfeasibleBudget, match=r"was 50GiB or 50% \(of the no-recompute peak\) meant\?"):
        planned_for(8, "50")
