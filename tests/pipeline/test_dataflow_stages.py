"""A compiled dataflow stage by itself, in one process: what crosses, what it recovers, its gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import couplings
import pytest
import torch
from one_process import CUTS
from torch import nn

from rematplan.ir import ModelError, ProblemError, UsageError
from rematplan.pipeline.dataflow import DataflowPart, dataflow_part, dataflow_stages
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import Run
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.pipeline.dataflow_plans import dataflow_plans
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.options import PlanOptions
from rematplan.plans.planner import Planner
from rematplan.runtime.pipeline.dataflow_code import check_crossing, compile_stage
from rematplan.runtime.pipeline.dataflow_schedule import DataflowSchedule
from rematplan.runtime.pipeline.dataflow_stage import Drift, StageHooks, distance, sample
from rematplan.runtime.pipeline.stage_modules import stage_modules

GROUP: Any = None


@pytest.fixture(scope="module")
def part() -> DataflowPart:
    stage = stage_modules(couplings.flow(), couplings.data(8)[:1], {}, CUTS)[1]
    planner = Planner(PlanOptions(budget="min", costs="roofline"))
    return dataflow_part(stage, planner, StagePlan(1), 1, 4)


def test_nothing_crosses_where_the_plan_keeps_nothing(part: DataflowPart) -> None:
    least = dataflow_plans(part.problem)
    assert {part.problem.measured(plan).held.kept for plan in least} == {0}
    for plan in least:
        check_crossing(compile_stage(part.step, plan.schedule, last=False))


def test_what_crosses_is_named(part: DataflowPart) -> None:
    plan = no_recompute(part.problem.graph)
    assert part.problem.measured(plan).held.kept > 0
    code = compile_stage(part.step, plan.schedule, last=False)
    with pytest.raises(ProblemError, match="kept from a stage's forward") as refused:
        check_crossing(code)
    assert code.crossing[0] in str(refused.value)


def test_tensors_of_a_message_are_charged_from_its_arrival(part: DataflowPart) -> None:
    """The message is received whole, even if the plan takes its second tensor late."""
    graph = part.problem.graph
    takes = [op.name for op in graph.ops if op.name.startswith("take_primals")]
    rest = [op.name for op in graph.ops if op.name not in takes]

    def reader(take: str) -> int:
        made = {*graph.op[take].writes}
        return next(at for at, name in enumerate(rest) if not made.isdisjoint(graph.op[name].reads))

    first, second = sorted(takes, key=reader)
    at = reader(second)
    assert at > 0
    late = plan_from_runs(graph, [first, *rest[:at], second, *rest[at:]], "late").schedule
    taken = part.problem.bytes((*graph.op[first].writes, *graph.op[second].writes))
    assert part.problem.resident(late)[0] == graph.input_bytes + taken
    early = plan_from_runs(graph, [first, second, *rest], "early").schedule
    assert max(part.problem.resident(late)) == max(part.problem.resident(early))


def test_answers_that_no_inverse_reads_are_not_used(part: DataflowPart) -> None:
    """A plan that keeps everything uses the gradients of the two outputs, not the outputs."""
    keeping, inverting = (
        part.compiled(plan, GROUP)
        for plan in (no_recompute(part.problem.graph), dataflow_plans(part.problem)[-1])
    )
    assert (keeping.unused_answers, inverting.unused_answers) == ({0, 1}, set())


def test_a_result_that_is_written_into_an_operand_counts_once(part: DataflowPart) -> None:
    graph = part.problem.graph
    schedule = no_recompute(graph).schedule
    assert "v_tanh = aten_tanh_(v_addmm)\n" in compile_stage(part.step, schedule, last=False).source
    at, size = schedule.index(Run("tanh")), 4 * 8 * 4 * 16
    assert part.problem.reusable["tanh"] == size
    assert part.problem.resident(schedule)[at] == resident_bytes(graph, schedule)[at] - size


def passed(part: DataflowPart, lost: bool = False) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """What a stage sends on and back for one micro-batch, and its gradients. ``lost``: the outputs are not returned."""
    stage = part.compiled(dataflow_plans(part.problem)[-1], GROUP)
    on: list[Any] = []
    back: list[Any] = []
    hooks = StageHooks(
        stage,
        (0, 0, 0),
        lambda t: on.extend(x.clone() for x in t),
        lambda t: back.extend(x.clone() for x in t),
    )
    torch.manual_seed(1)
    inputs, gradients = ([torch.randn(8, 16) for _ in range(2)] for _ in range(2))
    stage.submod.zero_grad()
    stage.forward(0, hooks, [t.clone() for t in inputs])
    returned = [torch.zeros_like(t) if lost else t.clone() for t in on]
    stage.backward(0, hooks, (), [*returned, *(g.clone() for g in gradients)])
    found = {n: p.grad.clone() for n, p in stage.submod.named_parameters()}
    stage.submod.zero_grad()
    given = [t.clone().requires_grad_() for t in inputs]
    outputs = stage.submod(*given)
    torch.autograd.backward(outputs, gradients)
    assert all(map(torch.equal, on, outputs))
    wanted = [*inputs, *(t.grad for t in given)]
    return back, wanted, {n: (g, dict(stage.submod.named_parameters())[n].grad) for n, g in found.items()}


def test_a_stage_recovers_its_input_and_has_autograds_gradients(part: DataflowPart) -> None:
    back, wanted, gradients = passed(part)
    assert all(couplings.distance(one, other) < 1e-6 for one, other in zip(back, wanted, strict=True))
    assert all(couplings.distance(one, other) < 1e-6 for one, other in gradients.values())


def test_without_the_returned_output_nothing_is_right(part: DataflowPart) -> None:
    back, wanted, gradients = passed(part, lost=True)
    assert couplings.distance(back[0], wanted[0]) > 0.1
    assert max(couplings.distance(one, other) for one, other in gradients.values()) > 0.01


def test_a_dataflow_stage_cannot_be_wrapped(part: DataflowPart) -> None:
    with pytest.raises(UsageError, match="cannot be wrapped"):
        dataflow_stages(part, dataflow_plans(part.problem)[0], None, wrapped=True)


def test_samples_tell_how_far_tensors_are_apart() -> None:
    x = torch.randn(4, 100)
    assert distance(sample(x), sample(x)) == 0.0
    assert distance(sample(1.1 * x), sample(x)) == pytest.approx(0.1, rel=1e-4)
    assert sample(x.t().contiguous().t()) == sample(x)  # whatever the strides
    assert sample(torch.tensor(2.0)) == [2.0]
    assert 16 <= len(sample(torch.randn(3, 7, 50))) <= 32
    assert sample(torch.arange(3)) == []  # whole numbers are not compared


class _Mixed(nn.Module):
    """A product with a matrix, which is not inverted, and then couplings, which are."""

    def __init__(self, couplings: nn.Module) -> None:
        super().__init__()
        self.matrix, self.couplings = nn.Linear(16, 16), couplings

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return self.couplings(self.matrix(a), b)


@pytest.mark.parametrize("mixed", [False, True])
def test_weights_that_change_before_the_backward_are_told(mixed: bool) -> None:
    model = couplings.flow()
    if mixed:
        model.blocks[2] = _Mixed(model.blocks[2])
    cut = stage_modules(model, couplings.data(8)[:1], {}, CUTS)[1]
    planner = Planner(PlanOptions(budget="min", costs="roofline"))
    part = dataflow_part(cut, planner, StagePlan(1), 1, 4)
    inverting = [plan for plan in dataflow_plans(part.problem) if "invert" in str(plan.schedule)]
    stage = part.compiled(inverting[0], GROUP)
    assert (stage.kept > 0) == mixed  # it keeps its input

    def run(change: float) -> float:
        drift, on = Drift(1, 5, most=0.1), []
        hooks = StageHooks(stage, (0, 0, 0), lambda t: on.extend(x.clone() for x in t), lambda t: None, drift)
        torch.manual_seed(1)
        stage.forward(0, hooks, [torch.randn(8, 16) for _ in range(2)])
        with torch.no_grad():
            for p in stage.submod.parameters():
                p.mul_(1 + change)
        stage.backward(0, hooks, (), [*on, *map(torch.ones_like, on)])
        return drift.largest

    assert 0 < run(0.0) < 1e-6
    assert run(0.001) > 1e-5
    with pytest.raises(
        ModelError, match=r"^stage 1 recovers .* of micro-batch 5 wrong by .* than 0.1: its weights"
    ):
        run(0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(15, 5), 0.5), r"argument 0 is \(15, 5\)"),
        ((torch.zeros(32, 5), 0.5), r"planned for a batch of \(16, 5\)"),
        ((torch.zeros(16, 5),), "planned for 2 arguments, not 1"),
    ],
)
def test_another_batch_than_planned_for_is_refused(given: tuple[Any, ...], message: str) -> None:
    planned = SimpleNamespace(args=(torch.empty(8, 5, device="meta"), 0.5), kwargs={})
    first: Any = SimpleNamespace(is_first=True, stage=planned)
    with pytest.raises(UsageError, match=message):
        DataflowSchedule(first, [], 2, 1, couplings.loss).step(*given)


def test_cuts_are_where_two_streams_cross_and_nothing_else() -> None:
    model, asked = (couplings.flow(blocks=5), {"cuts": "auto", "ranks": [0], "strategy": Auto(time_limit=1)})
    pipe = couplings.planned(model, 16, microbatches=4, budget="1GiB", **asked)
    stages = stage_modules(model, couplings.data(4)[:1], {}, pipe.cuts)
    assert [len(stage.inputs) for stage in stages[1:]] == [2, 2, 2]
