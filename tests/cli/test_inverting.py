"""Plans that may use inverses are never worse than plans without, in every command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo_arguments import zoo_arguments

import rematplan
from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.inversion_error import inverses_run
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import parse_budget
from rematplan.plans.plan_with_inverses import plan_either
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.inversion.find_inverses import with_exact_inverses, with_inverses
from rematplan.runtime.problem.planning_problem import training_graph


class Couplings(nn.Module):
    """``depth`` couplings of halves of one tensor; ``wide``: functions so costly that inverting them hardly pays."""

    def __init__(self, depth: int = 6, wide: int = 1) -> None:
        super().__init__()
        self.functions = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8 * wide), nn.GELU(), nn.Linear(8 * wide, 8)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for f in self.functions:
            a, b = x.chunk(2, -1)
            x = torch.cat([b, a + f(b)], -1)
        return x.square().mean()


def problems(wide: int = 1) -> tuple[TrainingGraph, TrainingGraph]:
    """Of a step without inverses that round, and with; copies, for which nothing is remembered yet."""
    plain, inverted = captured(wide)
    return replace(plain), replace(inverted)


@cache
def captured(wide: int) -> tuple[TrainingGraph, TrainingGraph]:
    torch.manual_seed(0)
    model, x = Couplings(wide=wide), torch.randn(64, 16)
    step, device = capture(model, (x,), f"couplings {wide}"), device_model("laptop-cpu")
    steps = with_exact_inverses(step), with_inverses(step, named_tensors(model)).step
    plain, inverted = (training_graph(s, roofline_costs(s, device)) for s in steps)
    return plain, inverted


@cache
def searched_without(wide: int, budget: int) -> float:
    return Auto(time_limit=0.1).plan(problems(wide)[0], budget).estimate.cost


@pytest.mark.parametrize("wide", [1, 8])
@pytest.mark.parametrize("budget", ["75%", "50%"])
def test_plans_with_inverses_are_never_worse(wide: int, budget: str) -> None:
    plain, inverted = problems(wide)
    amount = parse_budget(budget).bytes(no_recompute(plain).estimate.peak, lambda: 0)
    try:
        without = searched_without(wide, amount)
    except InfeasibleBudget:
        without = float("inf")
    # In less time than that search had, of which nothing is known here but what it left on disk.
    graph, plan = plan_either(Auto(time_limit=0.1), plain, inverted, parse_budget(budget))
    assert plan.estimate.peak <= amount
    assert plan.estimate.cost <= without
    assert graph in (plain, inverted)
    assert set(runs_of(plan.schedule)) <= graph.op.keys()


def test_the_plan_without_inverses_is_taken_if_it_recomputes_nothing() -> None:
    plain, inverted = problems()
    graph, plan = plan_either(Auto(time_limit=0.1), plain, inverted, parse_budget("100%"))
    assert graph is plain
    assert plan.estimate.overhead == 0
    least = no_recompute(inverted).estimate.peak
    with pytest.raises(InfeasibleBudget) as error:
        plan_either(Auto(time_limit=0.1), plain, inverted, parse_budget("1000B"))
    assert 1000 < error.value.smallest < least


def test_a_plan_is_transferred_to_the_step_with_split_storages() -> None:
    plain, inverted = problems()
    for plan in (no_recompute(plain), *ChenSqrt().curve(plain, ())):
        carried = transfer_plan(plan, inverted)
        assert carried is not None
        assert inverses_run(inverted, runs_of(carried.schedule)) == 0
        assert carried.estimate.reruns >= plan.estimate.reruns - len(plain.ops) // 10
        assert carried.estimate.cost <= 1.02 * plan.estimate.cost
        assert carried.estimate.peak <= 1.1 * plan.estimate.peak


@pytest.mark.parametrize(("budget", "depth", "strategy"), [("100%", 6, "auto"), ("min", 8, "reversible")])
def test_plan_module_inverts_if_it_saves_time_and_loads_such_plans(
    budget: str, depth: int, strategy: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Couplings(depth), torch.randn(64, 16)
    options: dict[str, Any] = {"inverses": True, "costs": "roofline"}
    chosen = rematplan.Auto(time_limit=0.1) if strategy == "auto" else strategy
    planned = rematplan.plan_module(model, (x,), budget=budget, strategy=chosen, **options)
    rematplan.save_plan(planned.plan, tmp_path / "plan.json")
    inverts = any(name.startswith("invert_") for name in runs_of(planned.plan.schedule))
    assert inverts == (budget == "min")  # with all the memory there is nothing to be saved
    loaded = rematplan.plan_module(
        model, (x,), strategy=rematplan.SavedPlan(tmp_path / "plan.json"), **options
    )
    assert runs_of(loaded.plan.schedule) == runs_of(planned.plan.schedule)
    gradients = []
    for one in (model, planned, loaded):
        model.zero_grad()
        one(x).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for found in gradients[1:]:
        assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(gradients[0], found, strict=True))


def test_the_budget_min_is_the_smaller_peak_of_inverting_and_recomputing() -> None:
    model, x = Couplings(4), torch.randn(64, 16)
    options: dict[str, Any] = {"inverses": True, "costs": "roofline", "budget": "min"}
    inverting = rematplan.plan_module(model, (x,), strategy="reversible", **options)
    either = rematplan.plan_module(model, (x,), strategy=rematplan.Auto(time_limit=0.1), **options)
    assert either.plan.peak <= inverting.plan.peak


def test_the_command_line_plans_with_inverses(call: Callable[..., Any], tmp_path: Path) -> None:
    model = zoo_arguments("revvit_s", image=64, width=32, batch=8, depth=2)
    for budget in ("100%", "85%"):
        without = call("plan", *model, "--budget", budget, "-S", "time_limit=0.1", "--json").data
        options = (*model, "--inverses", "--json")
        path = tmp_path / "plan.json"
        found = call("plan", *options, "--budget", budget, "-S", "time_limit=0.1", "-o", path).data
        assert found["budget"] == without["budget"]
        assert found["cost"] <= without["cost"]
        run = call("step", *options, "--plan", path, "--verify", "--steps", "1")
        assert run.status == 0
        assert run.data["cost"] == found["cost"]
        assert run.data["verification"]["bit_equal"] == (found["inversions"] == 0)
    found = call("plan", *options, "--strategy", "reversible", "--budget", "90%", "-o", path).data
    assert found["inversions"] > 0  # planned without weights, and so without what they would tell of scales
    run = call("step", *options, "--plan", path, "--verify", "--steps", "1")
    assert run.status == 0
    assert run.data["inversions"] == found["inversions"]
