"""Annealed plans of one network of every family, and of a real ONNX graph: bit-equal to plain autograd."""

from functools import cache
from pathlib import Path

import onnx
import pytest
import torch
from planned_steps import PlannedStep, verify
from torch import nn

from rematplan.api import LoadedStep, Sizes, load_step, problem, run_step
from rematplan.ir import TrainingGraph, UsageError
from rematplan.models import ZOO, export_onnx
from rematplan.models.transformer import DropPath
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.store_all import no_recompute

pytestmark = pytest.mark.usefixtures("few_blocks")
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
TWINS = {
    *("resnet34", "resnet101", "resnet152", "densenet161", "vit_b", "gpt24", "roberta", "revnet110"),
    *("resnet18", "mobilenet_v2", "hybrid38", "revswin_t", "revbert"),
}
"""Networks of whose ops there is another network."""


def sizes_of(name: str) -> Sizes:
    return Sizes(**dict(ZOO[name].tiny) | ({"tokens": 3} if name == "lstm" else {}))  # a cell a token


@cache
def loaded_step(name: str) -> tuple[LoadedStep, TrainingGraph]:
    if name in ZOO:
        loaded = load_step(name, sizes=sizes_of(name))
    else:
        loaded = load_step(LIGHT / f"{name}.onnx")
    return loaded, problem(loaded)


@pytest.mark.parametrize("network", ["light_squeezenet", *(name for name in ZOO if name not in TWINS)])
def test_least_peak_plan_is_bit_equal(network: str) -> None:
    loaded, graph = loaded_step(network)
    base = sum(t.bytes for t in graph.tensors)
    curve = Anneal(moves=1000).curve(graph, [base, base // 2])
    for plan in {id(p): p for p in (curve[-1], curve[len(curve) // 2])}.values():
        outcome = verify(PlannedStep(loaded.module, loaded.step, plan.schedule), loaded.batch, seed=3)
        assert outcome.bit_equal, outcome.differences
        assert outcome.compared > len(list(loaded.module.parameters()))


def test_each_step_of_a_file_draws_which_samples_skip_a_branch(tmp_path: Path) -> None:
    branch = nn.Sequential(nn.Linear(4, 4), DropPath(0.5))  # a dropout of a constant
    export_onnx(branch, (torch.randn(32, 4),), tmp_path / "m.onnx")
    loaded = load_step(tmp_path / "m.onnx", dims={"batch": 32}, loss="mse")
    plan = no_recompute(problem(loaded))
    assert sum(call.seeded for call in loaded.step.calls) == 1
    assert verify(PlannedStep(loaded.module, loaded.step, plan.schedule), loaded.batch).bit_equal
    assert loaded.module(*loaded.batch) != loaded.module(*loaded.batch)


@pytest.mark.parametrize("name", ["unet", "gpt12", "lstm"])
def test_a_step_without_weights_is_the_same_problem(name: str) -> None:
    loaded = load_step(name, sizes=sizes_of(name), weightless=True)
    graph = problem(loaded)
    assert graph == loaded_step(name)[1]
    with pytest.raises(UsageError, match="it can be planned, but not run"):
        run_step(loaded, no_recompute(graph))


def test_without_weights_any_size_is_captured_in_little_memory() -> None:
    sizes = Sizes(batch=64, tokens=1024, depth=2, width=4096, vocabulary=250_000)
    graph = problem(load_step("gpt12", sizes=sizes, weightless=True))
    assert graph.input_bytes > 5 * 2**30
    assert no_recompute(graph).estimate.peak > 100 * 2**30
