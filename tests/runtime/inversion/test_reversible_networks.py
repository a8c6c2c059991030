"""The zoo's reversible networks: inverted as modules and as files, with what is held not growing with the depth."""

from pathlib import Path

import pytest
from planned_steps import PlannedStep, verify

from rematplan.api import LoadedStep, Sizes, load_step, problem
from rematplan.ir import TrainingGraph
from rematplan.models import ZOO, build, example_inputs
from rematplan.models.export import export_onnx
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.plan import Plan
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute

pytestmark = pytest.mark.usefixtures("few_blocks")
BATCH = 32
"""Enough for a dropout's results to take more than the random state it would run again from; smaller ones are never
run again."""


def inverted(loaded: LoadedStep) -> tuple[TrainingGraph, Plan]:
    graph = problem(loaded)
    return graph, Reversible().curve(graph, ())[-1]


def held(graph: TrainingGraph, plan: Plan) -> int:
    return plan.estimate.peak - graph.input_bytes - sum(graph.size[t] for t in graph.outputs)


def check(loaded: LoadedStep, least: float) -> None:
    graph, plan = inverted(loaded)
    assert held(graph, plan) < least * held(graph, no_recompute(graph))
    predicted = worst_error(graph, plan.schedule)
    outcome = verify(PlannedStep(loaded.module, loaded.step, plan.schedule), loaded.batch, 1, predicted)
    assert 0 < predicted < 1e-5
    assert outcome.passed, outcome.differences


@pytest.mark.parametrize("name", ["revnet38", "hybrid38", "revvit_s", "revcol_t"])
def test_inverted_as_a_module(name: str) -> None:
    sizes = dict(ZOO[name].tiny) | {"batch": BATCH}
    check(load_step(name, sizes=Sizes(**sizes), inverses=True), 0.5)


@pytest.mark.parametrize("name", ["hybrid38", "revcol_t"])
def test_inverted_from_its_file(name: str, tmp_path: Path) -> None:
    sizes = ZOO[name].complete(dict(ZOO[name].tiny) | {"batch": BATCH})
    export_onnx(build(name, **sizes), example_inputs(name, **sizes), tmp_path / "net.onnx")
    loaded = load_step(tmp_path / "net.onnx", dims={"batch": BATCH}, loss=ZOO[name].loss, inverses=True)
    check(loaded, 0.6)


def test_what_is_held_does_not_grow_with_the_depth() -> None:
    sizes = Sizes(batch=16, image=8, width=4)
    shallow, deep = (inverted(load_step(f"revnet{n}", sizes=sizes, inverses=True)) for n in (38, 110))
    assert held(*shallow) == held(*deep)
    assert len(deep[0].ops) > 2 * len(shallow[0].ops)
