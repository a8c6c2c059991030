"""Plans without compiled loops: Chen's are those that compiled loops give, and eviction fits smaller budgets."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from rematplan.planner.auto.compile_kernels import compile_kernels, kernels_are_ready
from rematplan.planner.auto.eviction_simulation import Simulation, random_policy, tables_of
from rematplan.planner.auto.uncompiled_plans import STRATEGIES, uncompiled_plan
from rematplan.planner.blocks.lowering import Partition, lower_to_positions
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import pareto
from rematplan.planner.strategies.store_all import no_recompute


@pytest.fixture
def chen_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematplan.planner.auto.uncompiled_plans.plan_by_eviction", lambda *_, **__: None)


@pytest.mark.parametrize("seed", range(8))
def test_chens_plan_is_the_best_of_the_strategies_for_every_budget(chen_alone, problems, seed) -> None:
    graph = problems.random_training(Random(seed), 6 + 2 * seed)
    curves = [plan for s in STRATEGIES for plan in s.curve(graph, ()) if plan.estimate.reruns]
    for plan in pareto(curves):
        found = uncompiled_plan(graph, plan.peak, 60.0)
        assert found.estimate.cost == plan.estimate.cost
        assert found.peak <= plan.peak
    smallest = min((plan.peak for plan in curves), default=1)
    assert uncompiled_plan(graph, smallest - 1, 60.0) is None


def test_after_its_time_it_takes_what_fits_by_then(chen_alone, problems) -> None:
    graph = problems.residual()
    least = min(plan.peak for s in STRATEGIES for plan in s.curve(graph, ()))
    assert uncompiled_plan(graph, least, 0.0).peak == least
    assert uncompiled_plan(graph, 10**12, 0.0) is not None


@pytest.mark.parametrize("name", ["residual", "unet"])
@pytest.mark.parametrize("phases", [True, False])
def test_eviction_fits_budgets_below_those_of_chen(problems, name, phases) -> None:
    graph = getattr(problems, name)(6) if name == "unet" else problems.residual()
    least = min(plan.peak for s in STRATEGIES for plan in s.curve(graph, ()))
    if not phases:
        graph = replace(graph, ops=tuple(replace(op, phase=None) for op in graph.ops))
    found = uncompiled_plan(graph, least - 1, 60.0)
    assert found.strategy == "eviction"
    assert simulate(graph, found.schedule).peak == found.peak < least


def test_no_plan_is_found_within_a_budget_that_none_fits(problems) -> None:
    graph = problems.chain(4)
    assert uncompiled_plan(graph, max(graph.size.values()), 60.0) is None


@pytest.mark.parametrize("name", ["chain", "unet", "wide"])
def test_plain_and_compiled_loops_lower_alike(problems, name) -> None:
    graph = problems.chain(9) if name == "chain" else getattr(problems, name)(4)
    for plan in STRATEGIES[1].curve(graph, ()):
        if plan.blocks:
            partition = _partition(graph, plan)
            runs = [lower_to_positions(graph, partition, compiled=c) for c in (True, False)]
            assert np.array_equal(*runs)


@pytest.mark.parametrize("seed", range(12))
def test_plain_and_compiled_loops_evict_alike(problems, seed) -> None:
    source = Random(seed)
    graph = problems.random_training(source, 12)
    graph = replace(graph, never_rerun=tuple(op.name for op in graph.ops[seed % 3 :: 5]))
    deferred = len(tables_of(graph).peaks)
    for share in (1.0, 0.8, 0.6, 0.4):
        budget, policy = int(share * no_recompute(graph).peak), random_policy(source)
        both = []
        for compiled in (True, False):
            effort = Effort(moves=10**6)
            tables = tables_of(graph, 1 + seed % deferred)
            simulation = Simulation(tables, budget, policy, Random(seed), effort, compiled)
            both.append((simulation.run(), simulation.runs))
            assert effort.done == len(simulation.runs)
        assert both[0] == both[1]


def _partition(graph, plan):
    kept = [t for op in graph.ops[: len(graph.ops) // 4] for t in op.writes]
    return Partition(plan.blocks, tuple(kept))


EMPTY = """
import sys
from random import Random
sys.path.insert(0, {folder!r})
import problems
from rematplan.planner.auto.compile_kernels import kernels_are_ready
from rematplan.planner.auto.eviction_simulation import Simulation, random_policy, tables_of
from rematplan.planner.auto.uncompiled_plans import uncompiled_plan
from numba.core.dispatcher import Dispatcher
assert not kernels_are_ready()
graph = problems.residual()
assert uncompiled_plan(graph, 10**12, 60.0) is not None
compiled = [
    name
    for module in list(sys.modules.values())
    for name, value in list(vars(module).items())
    if isinstance(value, Dispatcher) and value.overloads
]
print(compiled, kernels_are_ready())
"""


def test_nothing_is_compiled_for_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = EMPTY.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"
    assert not list(tmp_path.rglob("*.nbc"))


def test_kernels_are_ready_once_compiled() -> None:
    compile_kernels()
    assert kernels_are_ready()
