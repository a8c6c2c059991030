"""Laws of a user's constraints and of plans and costs that travel as files."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy

import rematplan
from rematplan.ir import InfeasibleBudget, ModelError, ProblemError, UsageError
from rematplan.module.planned_module import planned_module
from rematplan.module.runner import Runner
from rematplan.module.shape_options import ShapeOptions
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.registry import STRATEGIES
from rematplan.planner.strategies.store_all import StoreAll
from rematplan.plans.options import PlanOptions, stated_strategy
from rematplan.plans.planner import Planner
from rematplan.plans.refining import StepPlan
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.policy import stated_policy


class Block(nn.Module):
    """A residual block whose parts have names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(torch.sigmoid(self.up(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
LIMITED = {
    "auto": rematplan.Auto(time_limit=0.3),
    "anneal": rematplan.Anneal(moves=8000),
    "ilp": rematplan.ILP(time_limit=0.3),
}


def planned(**more: Any) -> nn.Module:
    settings = {"budget": "85%", "strategy": "approx_dp", "costs": "roofline"} | more
    return rematplan.plan_module(model(), (X,), **settings)


@cache
def captured() -> CapturedStep:
    """The step of `model` for which a drop-in makes its plans."""
    seen = []

    class Noting(Planner):
        def plan(self, step: CapturedStep, first: bool = False) -> StepPlan:
            seen.append(step)
            return super().plan(step, first)

    planner = Noting(PlanOptions(budget="100%", strategy=StoreAll(), costs="roofline"))
    planned_module(model(), Runner("model", planner, ShapeOptions())).prepare(X)
    return seen[0]


def plan_of(strategy: str = "approx_dp", budget: str = "85%", policy: Any = None) -> Plan:
    """What `planned` would follow; without tracing the model each time."""
    chosen = stated_strategy(LIMITED.get(strategy, strategy))
    options = PlanOptions(budget=budget, strategy=chosen, costs="roofline", policy=stated_policy(policy))
    return Planner(options).plan(captured()).plan


def reruns(plan: Plan, what: str) -> int:
    """How often ops whose name begins so run beyond their first."""
    runs = [name for name in runs_of(plan.schedule) if name.startswith(what)]
    return len(runs) - len(set(runs))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_honours_them(strategy: str) -> None:
    stores_all = strategy in ("store_all", "reversible")  # there is nothing to invert here
    free = plan_of(strategy, budget="100%" if stores_all else "80%")
    bound = plan_of(strategy, budget="100%" if stores_all else "95%", policy=["aten.addmm"])
    assert reruns(free, "addmm") > 0 or stores_all
    assert reruns(bound, "addmm") == 0


@pytest.mark.parametrize(
    "name", ["aten.sigmoid", "aten::sigmoid", "aten.sigmoid.default", torch.ops.aten.sigmoid]
)
def test_ops_by_any_name(name: Any) -> None:
    assert reruns(plan_of(budget="70%"), "sigmoid") > 0
    assert reruns(plan_of(policy=[name]), "sigmoid") == 0
    assert reruns(plan_of(policy={name: CheckpointPolicy.MUST_SAVE}), "sigmoid") == 0
    assert reruns(plan_of(budget="70%", policy={name: CheckpointPolicy.PREFER_SAVE}), "sigmoid") > 0


def test_a_function_says_what_must_be_saved_as_selective_checkpointing_asks_it() -> None:
    asked = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append((context.is_recompute, op, [a.shape for a in args if isinstance(a, Tensor)]))
        saved = op is torch.ops.aten.sigmoid.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    plan = plan_of(policy=policy)
    assert reruns(plan, "sigmoid") == 0 < plan.estimate.reruns
    assert (False, torch.ops.aten.sigmoid.default, [torch.Size([256, 64])]) in asked


def test_a_module_never_runs_again() -> None:
    one = rematplan.plan_module(
        model(), (X,), budget="88%", strategy="approx_dp", costs="roofline", policy=["2.*", "4.up.*"]
    )
    again = [n for n in runs_of(one.plan.schedule) if runs_of(one.plan.schedule).count(n) > 1]
    assert again
    calls = one._rematplan.last.compiled.step.call
    assert not [n for n in again if calls[n].module == "2" or calls[n].module.startswith(("2.", "4.up"))]


def test_a_module_s_result_is_kept_and_the_module_may_be_named_by_itself() -> None:
    net = model()
    one = rematplan.plan_module(
        net, (X,), budget="88%", strategy="approx_dp", costs="roofline", policy=[net[2].norm, "3"]
    )
    step = one._rematplan.last.compiled.step
    runs = runs_of(one.plan.schedule)
    kept = [c.name for c in step.calls if c.module in ("2.norm", "3") and not c.backward and not c.is_view]
    assert any(runs.count(n) == 1 for n in kept)
    made_by_norm = [c.name for c in step.calls if c.module == "2.norm" and not c.backward and not c.is_view]
    assert made_by_norm
    assert all(runs.count(n) == 1 for n in made_by_norm)


def test_they_are_in_the_bound_and_in_what_is_refused() -> None:
    free = plan_of("auto", budget="80%")
    bound = plan_of("auto", budget="80%", policy=["aten.sigmoid"])
    assert bound.lower_bound >= free.lower_bound
    with pytest.raises(InfeasibleBudget):
        planned(budget="70%", policy=["aten.addmm", "aten.sigmoid", "aten.native_layer_norm", "aten.add"])


class Mixing(nn.Module):
    """Layers that take a mean over all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x * all_reduce(x.detach().mean(), "sum", distributed.group.WORLD) + x
        return x


def test_collectives_never_run_again() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        one = rematplan.plan_module(
            Mixing(), (X,), budget="78%", strategy=rematplan.Anneal(moves=5000), costs="roofline"
        )
        assert one.plan.estimate.reruns > 0
        assert "all_reduce" in one.source
        assert reruns(one.plan, "all_reduce") == reruns(one.plan, "wait_tensor") == 0
        one(X).sum().backward()
    finally:
        distributed.destroy_process_group()


def test_unknown_names_are_said() -> None:
    with pytest.raises(UsageError, match="neither a module nor an op"):
        planned(policy=["6"])
    with pytest.raises(UsageError, match=r"similar: .*aten\.sigmoid"):
        planned(policy=["aten.sigmoidal"])
    with pytest.raises(UsageError, match="a module of the model"):
        planned(policy=[nn.Linear(1, 1)])
    with pytest.raises(UsageError, match=r"write \[name\]"):
        planned(policy="0.up")
    with pytest.raises(UsageError, match="has MUST_RECOMPUTE; the budget decides"):
        planned(policy={"0.up": CheckpointPolicy.MUST_RECOMPUTE})
    with pytest.raises(UsageError, match=r"0\.up has 1; write a value of"):
        planned(policy={"0.up": 1})
    with pytest.raises(UsageError, match=r"the policy function failed at aten\.\S+: .* takes 1"):
        planned(policy=lambda op: CheckpointPolicy.MUST_SAVE)


def test_a_plan_travels_as_a_file(tmp_path: Path) -> None:
    first = planned(policy=["1"])
    rematplan.save_plan(first.plan, tmp_path / "plan.json")
    again = rematplan.plan_module(
        model(), (X,), costs="roofline", strategy=rematplan.SavedPlan(tmp_path / "plan.json"), policy=["1"]
    )
    assert again.plan.schedule == first.plan.schedule
    plain = model()
    for one in (again, plain):
        one(X).pow(2).mean().backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(again.parameters(), plain.parameters(), strict=True)
    )
    other = copy.deepcopy(plain)
    other[3].norm = nn.Identity()
    with pytest.raises(ProblemError, match="another graph"):
        rematplan.plan_module(
            other, (X,), costs="roofline", strategy=rematplan.SavedPlan(tmp_path / "plan.json"), policy=["1"]
        )
    with pytest.raises(UsageError, match="there is no budget"):
        rematplan.plan_module(model(), (X,), costs="roofline")


def test_costs_travel_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rematplan.cli.run_command import run

    sizes = ["--dim", "depth=6", "--dim", "width=8"]
    file = tmp_path / "costs.json"
    assert run(["profile", "chain", *sizes, "--dim", "batch=64", "-o", str(file), "--quiet"]) == 0
    other = ["plan", "chain", *sizes, "--budget", "95%", "--strategy", "approx_dp", "--json"]
    plan = [*other, "--dim", "batch=64"]
    documents = []
    for costs in ([], ["--costs", str(file)]):
        assert run([*plan, *costs]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0]["cost"] == documents[1]["cost"]
    assert documents[0]["peak"] == documents[1]["peak"]
    assert run([*other, "--dim", "batch=8", "--costs", str(file)]) == 2
    assert "lacks" in capsys.readouterr().err
    for content in (
        "{}",
        '{"format": "rematplan.profile/1"}',
        "[",
        '{"format": "rematplan.profile/1", "device": "", "calls": {"a": [-1, 0, []]}}',
    ):
        file.write_text(content)
        assert run([*plan, "--costs", str(file)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rematplan.cli.run_command import run

    deeper = ["chain", "--dim", "batch=64", "--dim", "width=8", "--dim", "depth=7"]
    net = [*deeper[:-1], "depth=6"]
    file = str(tmp_path / "plan.json")
    assert run(["plan", *net, "--budget", "95%", "--strategy", "approx_dp", "-o", file, "--quiet"]) == 0
    assert run(["step", *net, "--plan", file, "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verification"]["bit_equal"]
    assert run(["step", *deeper, "--plan", file]) == 2
    assert "another graph" in capsys.readouterr().err
    assert run(["step", *net]) == 2
    assert "--budget or a --plan" in capsys.readouterr().err


def test_what_is_sharded_before_it_is_planned_is_refused() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ModelError, match="plan first, then shard"):
            rematplan.plan_module(fully_shard(model()), (X,), budget="100%", costs="roofline")
    finally:
        distributed.destroy_process_group()
