"""`plan_module` with several micro-batches in flight, in a user's own schedules."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from cpp_compiler import NEEDS_COMPILER
from torch import nn

import rematplan
from rematplan.ir import InfeasibleBudget, UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.pipeline.actions import RankActions
from rematplan.planner.pipeline.auto_stages import AutoStages, StrategyStages
from rematplan.planner.pipeline.gpipe_and_1f1b import one_stage_a_rank
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.rank_search import RankPlan, RankSearch
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.plans.in_flight import stage_planner, with_in_flight
from rematplan.plans.stage_problems import stage_problem
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.problem.earlier_gradients import adding_problem
from rematplan.runtime.problem.loss_boundary import WEIGHTS, with_loss_boundary
from rematplan.runtime.problem.planning_problem import training_graph
from rematplan.runtime.problem.random_states import state_of, without_unused_states
from rematplan.runtime.problem.weight_gradients import with_weight_boundary

pytestmark = pytest.mark.usefixtures("few_searches")
ASKED: dict[str, Any] = {"costs": "roofline", "strategy": "approx_dp", "loss_memory": "4x"}
ROWS, WIDTH = 64, 32


class Mlp(nn.Module):
    """Layers whose backward reads what they make."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def model() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def example() -> torch.Tensor:
    return torch.zeros(ROWS, WIDTH, requires_grad=True)


def run(module: nn.Module, actions: RankActions) -> dict[int, torch.Tensor | None]:
    """Run a list of actions; the inputs' gradients."""
    inputs: dict[int, torch.Tensor] = {}
    losses: dict[int, torch.Tensor] = {}
    gradients: dict[int, torch.Tensor | None] = {}
    for a in actions:
        if a.kind == "F":
            generator = torch.Generator().manual_seed(a.microbatch)
            inputs[a.microbatch] = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
            losses[a.microbatch] = module(inputs[a.microbatch]).square().mean()
        elif a.kind == "W":
            rematplan.finish_weights(module)
        else:
            losses.pop(a.microbatch).backward()
            gradients[a.microbatch] = inputs.pop(a.microbatch).grad.sum(0)[:1]
    return gradients


@pytest.mark.parametrize("deferred", [None, 0, 2])
@pytest.mark.parametrize("in_flight", [2, 4])
def test_all_that_is_in_flight_fits_and_gradients_are_equal(in_flight: int, deferred: int | None) -> None:
    plain = model()
    planned = rematplan.plan_stage(
        copy.deepcopy(plain),
        (example(),),
        budget="95%" if deferred is None else "100%",
        in_flight=in_flight,
        deferred=deferred,
        **ASKED,
    )
    actions = with_in_flight(in_flight, deferred)
    peak, found = peak_above_entry(lambda: run(planned, actions), torch.device("cpu"))
    expected = run(plain, with_in_flight(in_flight, None))
    assert all(torch.equal(found[m], expected[m]) for m in expected if m in found)
    kept = rematplan.plan_stage(
        model(), (example(),), budget="100%", in_flight=in_flight, deferred=deferred, **ASKED
    )
    whole, _ = peak_above_entry(lambda: run(kept, actions), torch.device("cpu"))
    assert peak <= whole
    assert (planned.plan.estimate.reruns > 0) == (deferred is None)
    assert all(p.grad is not None for p in planned.parameters())


def test_gradients_add_up_to_those_of_one_by_one() -> None:
    plain = model()
    for deferred in (None, 1):
        planned = rematplan.plan_stage(
            model(), (example(),), budget="100%", in_flight=2, deferred=deferred, **ASKED
        )
        actions = with_in_flight(2, deferred)
        run(planned, actions)
        plain.zero_grad()
        run(plain, tuple(a for a in actions if a.kind != "W"))
        ours, theirs = ([p.grad for p in m.parameters()] for m in (planned, plain))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_hooks_of_parameters_run_when_weight_gradients_come_later() -> None:
    found = []
    for deferred in (None, 1):
        module, calls = model(), list[float]()
        for p in module.parameters():
            p.register_hook(lambda gradient: gradient * 3)
            p.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(float(p.grad.sum())))
        if deferred:
            asked = ASKED | {"in_flight": 2, "deferred": deferred}
            module = rematplan.plan_stage(module, (example(),), budget="100%", **asked)
        run(module, tuple(a for a in with_in_flight(2, 1) if deferred or a.kind != "W"))
        found.append((sorted(calls), [p.grad for p in module.parameters()]))
    assert found[0][0] == found[1][0] != []
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_the_least_budget_is_met_and_a_byte_less_is_refused() -> None:
    with pytest.raises(InfeasibleBudget) as refused:
        rematplan.plan_stage(model(), (example(),), budget=1000, in_flight=3, **ASKED)
    least = refused.value.smallest
    planned = rematplan.plan_stage(model(), (example(),), budget=least, in_flight=3, **ASKED)
    with pytest.raises(InfeasibleBudget):
        rematplan.plan_stage(model(), (example(),), budget=least - 1, in_flight=3, **ASKED)
    states = sum(p.nbytes for p in planned.parameters())
    peak, _ = peak_above_entry(lambda: run(planned, with_in_flight(3, None)), torch.device("cpu"))
    assert states + peak <= least


class Gated(nn.Module):
    """A norm, a gated unit and a residual, whose pointwise ops fused kernels compute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.wide(self.norm(x)).chunk(2, -1)
        return x + a.sigmoid() * b


@NEEDS_COMPILER
@pytest.mark.parametrize(("in_flight", "deferred"), [(3, None), (3, 2)])
def test_fused_kernels_of_all_in_flight_fit(in_flight: int, deferred: int | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Gated() for _ in range(2)))
    more = {"in_flight": in_flight, "deferred": deferred, "kernels": "fused", "strategy": "chen_sqrt"}
    asked = ASKED | more
    with pytest.raises(InfeasibleBudget) as refused:
        rematplan.plan_stage(copy.deepcopy(plain), (example(),), budget=1000, **asked)
    least, actions = refused.value.smallest, with_in_flight(in_flight, deferred)
    planned = rematplan.plan_stage(copy.deepcopy(plain), (example(),), budget=least, **asked)
    assert "fused_" in planned.source
    peak, found = peak_above_entry(lambda: run(planned, actions), torch.device("cpu"))
    assert sum(p.nbytes for p in plain.parameters()) + peak <= least
    assert planned.plan.estimate.reruns
    expected = run(plain, with_in_flight(in_flight, None))
    for a, b in ((found[m], expected[m]) for m in expected if m in found):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("deferred", [None, 1])
def test_split_layers_need_less_for_all_in_flight(deferred: int | None) -> None:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, WIDTH)) for _ in range(2))
    plain, least = nn.Sequential(*layers), dict[str, int]()
    asked: dict[str, Any] = ASKED | {"in_flight": 2, "deferred": deferred, "strategy": "store_all"}
    parts = {"whole": {}, "parts": {"split": {"0": 4, "1": 4}}}
    for name, more in parts.items():
        with pytest.raises(InfeasibleBudget) as refused:
            rematplan.plan_stage(plain, (example(),), budget="1%", **asked, **more)
        least[name] = refused.value.smallest
    # What later gradients of weights are computed from exists whole until then.
    assert (least["parts"] < least["whole"]) == (deferred is None)
    planned = rematplan.plan_stage(
        copy.deepcopy(plain), (example(),), budget=least["parts"], **asked, **parts["parts"]
    )
    actions = with_in_flight(2, deferred)
    peak, found = peak_above_entry(lambda: run(planned, actions), torch.device("cpu"))
    assert sum(p.nbytes for p in plain.parameters()) + peak <= least["parts"]
    expected = run(plain, with_in_flight(2, None))
    assert all(torch.equal(found[m], expected[m]) for m in expected if m in found)


def test_chosen_splits_fit_bytes_that_whole_layers_exceed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 2048), nn.Tanh(), nn.Linear(2048, WIDTH))
    # A whole layer needs 3.2 such tensors in addition to parameters and gradients.
    budget = 2 * sum(p.nbytes for p in plain.parameters()) + 14 * (ROWS * 2048 * 4) // 5
    asked: dict[str, Any] = {"costs": "roofline", "strategy": Auto(moves=4000), "in_flight": 2}
    with caplog.at_level("INFO", "rematplan"):
        planned = rematplan.plan_stage(
            copy.deepcopy(plain), (example(),), budget=budget, split="auto", **asked
        )
    assert "of tensors exist in parts only" in caplog.text
    actions = with_in_flight(2, None)
    peak, found = peak_above_entry(lambda: run(planned, actions), torch.device("cpu"))
    assert sum(p.nbytes for p in plain.parameters()) + peak <= budget
    expected = run(plain, actions)
    assert all(torch.equal(found[m], expected[m]) for m in expected)
    caplog.clear()
    rematplan.plan_stage(plain, (example(),), budget="100%", split="auto", **asked)
    assert "exist in parts only" not in caplog.text


def test_two_stages_may_share_parameters_whose_gradients_come_later() -> None:
    module, asked = model(), ASKED | {"budget": "100%", "in_flight": 2, "deferred": 1}
    _, planned = (rematplan.plan_stage(module, (example(),), **asked) for _ in range(2))
    run(planned, with_in_flight(2, 1))
    assert all(p.grad is not None for p in module.parameters())


def test_more_in_flight_keep_less_within_the_same_bytes() -> None:
    with pytest.raises(InfeasibleBudget) as refused:
        rematplan.plan_stage(model(), (example(),), budget=1000, in_flight=5, **ASKED)
    few, many = (
        rematplan.plan_stage(model(), (example(),), budget=refused.value.smallest, in_flight=k, **ASKED).plan
        for k in (2, 5)
    )
    assert few.estimate.reruns < many.estimate.reruns


@pytest.mark.parametrize("deferred", [None, 1])
def test_the_budget_of_several_in_flight_includes_reserved_objects(deferred: int | None) -> None:
    smallest = []
    for reserved in ((), ("1MiB", nn.Linear(WIDTH, 1, bias=False))):
        more: dict[str, Any] = {"in_flight": 2, "deferred": deferred, "reserved": reserved}
        with pytest.raises(InfeasibleBudget) as refused:
            rematplan.plan_stage(model(), (example(),), budget=1000, **ASKED, **more)
        smallest.append(refused.value.smallest)
    assert smallest[1] - smallest[0] == 2**20 + 4 * WIDTH


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"in_flight": 0}, "in_flight is 0; it must be a whole number of at least 1"),
        ({"in_flight": None}, "in_flight is None"),
        ({"in_flight": 1.5}, r"in_flight is 1\.5"),
        ({"deferred": "1"}, "deferred is '1'; it must be a whole number of at least 0"),
        ({"in_flight": 2, "strategy": rematplan.Auto(two_lanes="on")}, "cannot be combined with two lanes"),
        ({"in_flight": 2, "strategy": rematplan.SavedPlan("x.json")}, "cannot be combined with a saved plan"),
        ({"in_flight": 2, "strategy": Auto(keep_order=True)}, "cannot be combined with keep_order of auto"),
        ({"in_flight": 2, "on_infeasible": "least"}, "cannot be combined with on_infeasible"),
        ({"in_flight": 2, "budget": "min"}, "in bytes or as a percentage"),
    ],
)
def test_what_cannot_be_asked_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rematplan.plan_stage(model(), (example(),), **{"budget": "100%", "costs": "roofline"} | more)


class Shifted(nn.Module):
    """Layers of which the first adds a weight, whose gradient is a sum of the input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.rest = nn.Parameter(torch.ones(WIDTH)), Mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(x + self.shift)
        return out


def test_weight_gradients_that_read_the_inputs_gradient_come_with_it() -> None:
    plain = Shifted()
    asked = {**ASKED, "strategy": rematplan.Anneal(time_limit=0.5)}
    planned = rematplan.plan_stage(
        copy.deepcopy(plain), (example(),), budget="100%", in_flight=2, deferred=1, **asked
    )
    step, runs = planned._rematplan.last.compiled.step, runs_of(planned.plan.schedule)
    (returned,) = (step.values[o.value].storage for o in step.outputs if o.kind == "input gradient")
    (reading,) = (call.name for call in step.calls if returned in step.reads(call))
    assert runs.index(reading) < runs.index(WEIGHTS)
    graph = with_loss_boundary(step, training_graph(step, roofline_costs(step, device_model("laptop-cpu"))))
    assert with_weight_boundary(step, graph).ordered == (reading, WEIGHTS)
    actions = with_in_flight(2, 1)
    run(planned, actions)
    run(plain, tuple(a for a in actions if a.kind != "W"))
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def deferring(module: nn.Module, **more: Any) -> nn.Module:
    """The module planned with weight gradients of one earlier backward left for later."""
    asked = ASKED | {"budget": "100%", "in_flight": 2, "deferred": 1} | more
    return rematplan.plan_stage(module, (example(),), **asked)


def equal_gradients(*modules: nn.Module) -> bool:
    """Whether all parameters of both modules have gradients, and these are equal."""
    ours, theirs = ([p.grad for p in m.parameters() if p.grad is not None] for m in modules)
    every = len(list(modules[0].parameters()))
    return len(ours) == len(theirs) == every and all(map(torch.equal, ours, theirs))


def test_weight_gradients_of_calls_of_several_shapes_are_finished_in_order() -> None:
    """Each shape has a plan of its own."""
    plain, planned = model(), deferring(model())
    for rows in (ROWS, ROWS // 2):
        for module in (plain, planned):
            module(torch.ones(rows, WIDTH, requires_grad=True)).square().sum().backward()
    assert [rematplan.finish_weights(planned) for _ in range(2)] == [1, 0]
    assert equal_gradients(planned, plain)


def test_a_copy_finishes_its_own_weight_gradients() -> None:
    planned, plain = deferring(model()), model()
    twin = copy.deepcopy(planned)
    for module in (twin, planned, plain):
        module(example() + 1).square().sum().backward()
    assert rematplan.finish_weights(planned) == 0
    assert equal_gradients(planned, plain)
    assert all(p.grad is None for p in twin.parameters())
    assert rematplan.finish_weights(twin) == 0
    assert equal_gradients(twin, plain)


def test_a_parameter_that_is_frozen_after_its_forward_gets_no_gradient() -> None:
    plain, planned = model(), deferring(model())
    for module in (plain, planned):
        result = module(example() + 1)
        module.layers[1].requires_grad_(False)
        result.square().sum().backward()
    rematplan.finish_weights(planned)
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (not theirs.requires_grad)


def test_an_input_that_waits_for_weight_gradients_does_not_keep_its_gradient() -> None:
    planned, given = deferring(model()), example()
    planned(given).square().sum().backward()
    gradient = weakref.ref(given.grad)
    del given
    assert gradient() is None
    rematplan.finish_weights(planned)


def test_a_second_backward_before_the_weight_gradients_is_refused() -> None:
    planned, plain = deferring(model()), model()
    loss = planned(example() + 1).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call finish_weights first"):
        loss.backward(retain_graph=True)
    rematplan.finish_weights(planned)
    loss.backward()
    rematplan.finish_weights(planned)
    one = plain(example() + 1).square().sum()
    one.backward(retain_graph=True)
    one.backward()
    assert equal_gradients(planned, plain)


def test_the_state_of_the_generator_is_counted_while_a_dropout_runs_again() -> None:
    """Its first state is kept from the forward to then. The last dropout makes the output, so it runs once."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)]
    planned = rematplan.plan_stage(nn.Sequential(*layers), (example(),), budget="100%", in_flight=2, **ASKED)
    step, state = planned._rematplan.last.compiled.step, torch.get_rng_state().nbytes
    graph = with_loss_boundary(step, training_graph(step, roofline_costs(step, device_model("laptop-cpu"))))
    graph = stage_problem(step, without_unused_states(graph), template=StagePlan(0)).graph
    *again, last = (call.name for call in step.calls if call.seeded)
    assert last in graph.never_rerun
    assert [graph.size[state_of(name)] for name in (*again, last)] == [state] * 3 + [0]
    assert all(state_of(name) in graph.op[name].reads for name in again)


def test_nothing_left_to_finish_is_said() -> None:
    planned = rematplan.plan_stage(model(), (example(),), budget="100%", in_flight=2, deferred=1, **ASKED)
    with pytest.raises(UsageError, match="waits for its weight gradients"):
        rematplan.finish_weights(planned)


def test_calls_before_a_backward_that_exceed_the_budget_together_are_told_once() -> None:
    first, second = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    one, plain = rematplan.plan_module(model(), (first,), budget="100%", **ASKED), model()
    budget = 2 * one.plan.budget
    two = rematplan.plan_stage(model(), (first,), budget=budget, in_flight=2, **ASKED)

    def step(module: nn.Module) -> None:
        (module(first) * module(second)).mean().backward()

    step(plain)
    for _ in range(2):  # a backward each: nothing is said
        one(first).square().mean().backward()
        one.zero_grad()
    with pytest.warns(UserWarning, match="Mlp is called again before the backward of .* in_flight=2"):
        step(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.zero_grad()
        step(one)
        step(two)
    for module in (one, two):
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(module.parameters(), plain.parameters(), strict=True)
            if p.grad is not None and q.grad is not None
        )
    two.zero_grad()
    peak, _ = peak_above_entry(lambda: step(two), torch.device("cpu"))
    assert peak + sum(t.nbytes for t in (*two.parameters(), first, second)) <= budget


def test_the_peak_does_not_grow_with_the_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[RankPlan] = []
    search = RankSearch.run
    monkeypatch.setattr(RankSearch, "run", lambda self: found.append(search(self)) or found[-1])
    rematplan.plan_stage(model(), (example(),), budget="100%", in_flight=3, **ASKED)
    (actions,) = one_stage_a_rank("long", [3], 40).actions
    assert rank_peak(actions, found[0].stages) == found[0].peak


def test_stages_are_planned_by_the_strategy() -> None:
    assert stage_planner(Auto(seed=3, gap=0.1)) == AutoStages(math.inf, 3, 0.1)
    assert stage_planner(ApproxDP()) == StrategyStages(ApproxDP())


def test_an_op_that_adds_to_a_gradient_runs_only_once() -> None:
    """Each further run would add the gradient once more."""
    planned = rematplan.plan_stage(model(), (example(),), budget="100%", in_flight=2, **ASKED)
    planned(example()).sum().backward()
    step = planned._rematplan.last.compiled.step
    graph = training_graph(step, roofline_costs(step, device_model("a100")))
    adding = adding_problem(step, graph, {i.target for i in step.inputs if i.kind == "parameter"})
    marked = {op.name for op in adding.ops if any(t.endswith(" added)") for t in op.writes)}
    assert len(marked) == 8
    assert marked <= set(adding.never_rerun)
