"""Every strategy on every network of the zoo and on real ONNX graphs: bit-equal to plain autograd."""

from pathlib import Path

import onnx
import pytest

from rematplan.api import LoadedStep, Sizes, load_step, problem
from rematplan.ir import LatticeTooLarge, TrainingGraph
from rematplan.models import ZOO
from rematplan.planner.strategies.registry import STRATEGIES
from rematplan.runtime.training_step import PlannedStep, verify

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
REAL = ("light_squeezenet", "light_inception_v1")


@pytest.fixture(scope="module", params=[*ZOO, *REAL])
def network(request: pytest.FixtureRequest) -> tuple[LoadedStep, TrainingGraph]:
    name = request.param
    if name in REAL:
        loaded = load_step(LIGHT / f"{name}.onnx")
    else:
        loaded = load_step(name, sizes=Sizes(**ZOO[name].tiny))
    return loaded, problem(loaded)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "auto"])
def test_least_peak_plan_is_bit_equal(network: tuple[LoadedStep, TrainingGraph], name: str) -> None:
    loaded, graph = network
    quick = {"time_limit": 1.0} if "time_limit" in STRATEGIES[name].__dataclass_fields__ else {}
    base = sum(t.bytes for t in graph.tensors)
    try:
        curve = STRATEGIES[name](**quick).curve(graph, [base, base // 2])
    except LatticeTooLarge:
        curve = STRATEGIES["approx_dp"]().curve(graph, [])
    for plan in {id(p): p for p in (curve[-1], curve[len(curve) // 2])}.values():
        outcome = verify(PlannedStep(loaded.module, loaded.step, plan.schedule), loaded.batch, seed=3)
        assert outcome.bit_equal, outcome.differences
        assert outcome.compared > len(list(loaded.module.parameters()))
