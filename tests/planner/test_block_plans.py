"""Plans of the block strategies are valid, agree with the independent checker, and form monotone curves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import (
    InfeasibleBudget,
    LatticeTooLarge,
    Op,
    Tensor,
    TrainingGraph,
    UsageError,
    problem_to_json,
    save_problem,
)
from rematplan.planner.blocks.forward_graph import forward_graph
from rematplan.planner.blocks.lower_sets import lower_sets
from rematplan.planner.blocks.lowering import Partition, lower_to_positions, partition_of
from rematplan.planner.core.plan import plan_from_runs, plan_to_json, save_plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Enough, pareto
from rematplan.planner.registry import STRATEGIES, strategy
from rematplan.planner.strategies.block_strategy import CandidateStrategy
from rematplan.planner.strategies.dp_strategy import DPStrategy

PROFILE = settings(max_examples=25, deadline=None, derandomize=True)

KINDS = [
    strategy(name, **({"objective": objective} if objective else {}))
    for name, kind in STRATEGIES.items()
    if name == "store_all" or issubclass(kind, CandidateStrategy)
    for objective in (("time", "memory") if issubclass(kind, DPStrategy) else (None,))
]
NAMES = [f"{s.name}-{getattr(s, 'objective', '')}".strip("-") for s in KINDS]


def check_curve(graph, curve, checker):
    data = problem_to_json(graph)
    forward_order = [op.name for op in graph.ops if op.name in graph.ordered]
    for plan in curve:
        found = checker.replay(data, plan_to_json(plan))
        assert found["peak"] == plan.estimate.peak
        assert found["cost"] == pytest.approx(plan.estimate.cost)
        first = list(dict.fromkeys(runs_of(plan.schedule)))
        assert sorted(first) == sorted(op.name for op in graph.ops)
        assert [name for name in first if name in graph.ordered] == forward_order
    overheads = [p.estimate.overhead for p in curve]
    peaks = [p.estimate.peak for p in curve]
    assert overheads == sorted(overheads)
    assert peaks == sorted(set(peaks), reverse=True)
    assert overheads[0] == pytest.approx(0)
    assert peaks[0] <= plan_from_runs(graph, [op.name for op in graph.ops], "x").estimate.peak


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@PROFILE
@given(seed=st.integers(0, 10**9), tape=st.booleans())
def test_every_plan_passes_the_checker(problems, checker, kind, seed, tape):
    rng = Random(seed)
    graph = (
        problems.random_training(rng, rng.randint(0, 14))
        if tape
        else problems.scrambled(rng, rng.randint(1, 22))
    )
    if not graph.has_phases:
        graph = problems.chain(2)
    try:
        curve = kind.curve(graph, ())
    except LatticeTooLarge:
        assert kind.name == "exact_dp"
        return
    check_curve(graph, curve, checker)


@PROFILE
@given(seed=st.integers(0, 10**9), lean=st.booleans())
def test_any_chain_of_lower_sets_and_any_kept_tensors_can_be_lowered(problems, checker, seed, lean):
    rng = Random(seed)
    graph = problems.scrambled(rng, rng.randint(0, 30))
    view = forward_graph(graph)
    try:
        family = lower_sets(view, 500, "x")
    except LatticeTooLarge:
        family = (0, *view.ancestors, view.everything)
    chain = []
    for mask in rng.sample(family, min(len(family), 5)):
        if mask and all(mask & ~m == 0 or m & ~mask == 0 for m in chain):
            chain.append(mask)
    chain = sorted({*chain, view.everything})
    partition = partition_of(graph, chain, lean)
    if rng.random() < 0.5:
        kept = tuple(t.name for t in graph.tensors if rng.random() < 0.3)
        partition = Partition(partition.blocks, kept)
    runs = [graph.ops[o].name for o in lower_to_positions(graph, partition)]
    plan = plan_from_runs(graph, runs, "x")
    assert checker.replay(problem_to_json(graph), plan_to_json(plan))["peak"] == plan.estimate.peak
    assert {op.name for op in graph.ops} == set(runs_of(plan.schedule))


@pytest.fixture(scope="module")
def networks(problems):
    """Searched once each: what is found is remembered with the problem."""
    return {"unet": problems.unet(), "residual": problems.residual((2, 2, 2, 2))}


@pytest.mark.parametrize("shape", ["unet", "residual"])
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_plans_of_the_zoos_networks_are_valid(networks, checker, kind, shape):
    graph = networks[shape]
    check_curve(graph, kind.curve(graph, ()), checker)


def test_the_checker_program_accepts_plan_files(problems, checker, tmp_path):
    graph, kind = problems.residual((1, 1)), strategy("approx_dp")
    curve = kind.curve(graph, ())
    budget = curve[len(curve) // 2].estimate.peak
    save_problem(graph, tmp_path / "problem.json")
    save_plan(kind.plan(graph, budget), tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, checker.__file__, str(tmp_path / "problem.json"), str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak"] <= budget


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_budgets_are_kept_and_the_smallest_peak_is_named(problems, kind):
    graph = problems.unet(3)
    curve = kind.curve(graph, ())
    smallest, least = curve[-1].estimate.peak, 0.0
    for share in (2.0, 1.0, 0.9, 0.7, 0.5, 0.3):
        budget = int(share * curve[0].estimate.peak)
        if budget >= smallest:
            plan = kind.plan(graph, budget)
            assert plan.estimate.peak <= budget == plan.budget
            assert plan.estimate.overhead >= least - 1e-12
            least = plan.estimate.overhead
        else:
            with pytest.raises(InfeasibleBudget) as caught:
                kind.plan(graph, budget)
            assert caught.value.smallest == smallest
    assert kind.plan(graph, 2**62).estimate.overhead == pytest.approx(0)
    assert kind.plan(graph, smallest).estimate.peak == smallest


def test_only_needed_ops_are_recomputed_and_never_the_last_block(problems):
    graph = problems.chain(9)
    names = [op.name for op in graph.ops if op.phase == "forward"]
    blocks = (tuple(names[:3]), tuple(names[3:6]), tuple(names[6:]))
    kept = (graph.op[names[2]].writes[0], graph.op[names[5]].writes[0])
    runs = [graph.ops[o].name for o in lower_to_positions(graph, Partition(blocks, kept))]
    again = [name for i, name in enumerate(runs) if name in runs[:i]]
    # In a chain of convolutions the backward reads each input: all but the boundaries come back.
    assert again == [*names[3:5], *names[0:2]]


def test_dp_beats_chen_if_there_are_few_cut_points(networks):
    """As published: U-Net's skips leave few cut points, so that Chen's least peak lies far above the DPs'."""
    graph = networks["unet"]
    least = {name: kind.curve(graph, ())[-1].estimate.peak for name, kind in zip(NAMES, KINDS, strict=True)}
    chen = min(least["chen_sqrt"], least["chen_greedy"])
    assert least["exact_dp-time"] <= least["approx_dp-time"]
    assert least["exact_dp-memory"] <= least["approx_dp-memory"] < 0.7 * chen
    assert chen < least["store_all"]


@pytest.mark.parametrize("grid", [1, 2, 3, 8, 9])
def test_chens_greedy_strategy_tries_as_many_thresholds_as_it_is_asked_to(problems, grid):
    chains = strategy("chen_greedy", grid=grid).chains(forward_graph(problems.chain(9)), lambda *_: None)
    assert len(list(chains)) == grid


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_exact_dp_is_never_worse_than_approx_dp(problems, objective):
    graph = problems.residual((2, 2))
    exact = strategy("exact_dp", objective=objective)
    for plan in strategy("approx_dp", objective=objective).curve(graph, ()):
        assert exact.plan(graph, plan.estimate.peak).estimate.cost <= plan.estimate.cost


def test_a_chain_of_a_thousand_layers(problems, checker):
    graph = problems.chain(1000)
    for name in ("chen_sqrt", "chen_greedy"):
        started = time.process_time()
        curve = strategy(name).curve(graph, ())
        assert time.process_time() - started < 10
        check_curve(graph, (curve[0], curve[-1]), checker)
        assert curve[-1].estimate.peak < 0.5 * curve[0].estimate.peak
    check_curve(graph, strategy("approx_dp", budgets=2, ticks=50).curve(graph, ()), checker)


def test_a_wide_graph_is_too_large_for_exact_dp_only(problems, checker):
    graph = problems.wide(30)
    with pytest.raises(LatticeTooLarge, match="approx_dp"):
        strategy("exact_dp").plan(graph, 10**12)
    check_curve(graph, strategy("approx_dp").curve(graph, ()), checker)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("size", [0, 1, 2**56])
def test_the_smallest_and_largest_sizes_are_planned(problems, checker, kind, size):
    """Sums of these leave 64-bit integers; nothing may wrap around, and zero divides nothing."""
    graph = problems.chain(20, size)
    curve = kind.curve(graph, ())
    check_curve(graph, curve, checker)
    if size > 1 and kind.name != "store_all":
        assert curve[-1].estimate.peak < 0.6 * curve[0].estimate.peak


@pytest.mark.parametrize("cost", [0.0, 1e-300, 1e290])
def test_the_smallest_and_largest_costs_are_planned(problems, checker, cost):
    graph = problems.chain(6)
    ops = tuple(replace(op, cost=cost) for op in graph.ops)
    graph = replace(graph, ops=ops)
    for kind in KINDS:
        check_curve(graph, kind.curve(graph, ()), checker)


def test_a_problem_without_a_backward_is_refused(problems):
    ops = (Op("a", (), ("x",), 1.0), Op("b", ("x",), ("y",), 1.0))
    graph = TrainingGraph("plain", (Tensor("x", 8), Tensor("y", 8)), (), ("y",), ops)
    for kind in KINDS:
        if kind.name != "store_all":
            with pytest.raises(UsageError, match="no op of problem 'plain' is marked backward"):
                kind.plan(graph, 100)
    assert strategy("auto").plan(graph, 100).estimate.peak == 16


def test_each_problem_is_searched_once(problems):
    graph = problems.residual((1, 1))
    seen = []
    kind = strategy("approx_dp")
    first = kind.curve(graph, (), lambda fraction, text: seen.append((fraction, text)))
    assert all(0 <= fraction <= 1 for fraction, _ in seen)
    assert seen
    count = len(seen)
    again = kind.plan(graph, 10**12, lambda fraction, text: seen.append((fraction, text)))
    assert len(seen) == count
    assert again.schedule == first[0].schedule
    assert strategy("approx_dp", objective="memory").curve(graph, ()) != first


def test_a_search_stopped_by_progress_returns_its_best_plans(problems):
    graph, seen = problems.residual((2, 2, 2)), []

    def progress(_fraction, text):
        seen.append(text)
        if len(seen) == 8:
            raise Enough

    strategy_ = strategy("exact_dp")
    some = strategy_.curve(graph, (), progress)
    every = strategy_.curve(graph, ())
    assert 2 < len(some) < len(every)
    assert strategy_.curve(replace(graph), ()) == every


def test_pareto_keeps_the_plans_that_no_other_dominates(problems):
    curve = strategy("approx_dp").curve(problems.unet(2), ())
    assert pareto([*curve, *curve]) == curve
