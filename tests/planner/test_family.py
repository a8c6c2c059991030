"""A family gives for any sizes what the simulator gives, and keeps the plans that are the best at sizes met."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import Op, ProblemError, Tensor, TrainingGraph
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import Free, Run, runs_of
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import pareto
from rematplan.planner.family import plan_family as module
from rematplan.planner.family.amounts_by_position import amounts_of
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.planner.family.schedule_by_position import member_of
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute

PROFILE = settings(max_examples=60, deadline=None, derandomize=True)


def with_inverses(graph: TrainingGraph, rng: Random) -> TrainingGraph:
    """Some ops of the graph can be undone: an inverse recovers what an op read from what it wrote."""
    inputs = set(graph.inputs)
    inverses = [
        Op(f"un{op.name}", (*op.writes, *op.reads[1:]), op.reads[:1], rng.random(), rng.randint(0, 9))
        for op in graph.ops
        if op.writes and op.reads and op.reads[0] not in {*inputs, *op.reads[1:]} and rng.random() < 0.5
    ]
    return replace(graph, inverses=tuple(inverses))


def of_other_sizes(graph: TrainingGraph, rng: Random, largest: int = 2**40) -> TrainingGraph:
    """The same problem at another size: bytes, workspaces and costs are drawn."""

    def other(op: Op) -> Op:
        return replace(op, cost=rng.choice((0.0, rng.random() * 1e3)), workspace=rng.randint(0, largest))

    return replace(
        graph,
        tensors=tuple(replace(t, bytes=rng.choice((0, rng.randint(0, largest)))) for t in graph.tensors),
        ops=tuple(map(other, graph.ops)),
        inverses=tuple(map(other, graph.inverses)),
    )


def renamed(graph: TrainingGraph) -> TrainingGraph:
    """The same problem with other names, and with its tensors in another order."""

    def many(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("n" + name for name in names)

    def other(op: Op) -> Op:
        return replace(op, name="n" + op.name, reads=many(op.reads), writes=many(op.writes))

    return TrainingGraph(
        name="renamed",
        tensors=tuple(replace(t, name="n" + t.name) for t in reversed(graph.tensors)),
        inputs=many(graph.inputs),
        outputs=many(graph.outputs),
        ops=tuple(map(other, graph.ops)),
        inverses=tuple(map(other, graph.inverses)),
        ordered=many(graph.ordered),
        never_rerun=many(graph.never_rerun),
    )


def random_runs(graph: TrainingGraph, rng: Random, extra: int) -> list[str]:
    """The base order with ops and inverses at any later place where everything they read was once written."""
    runs = [op.name for op in graph.ops]
    for _ in range(extra if runs else 0):
        at = rng.randint(0, len(runs))
        made = set(graph.inputs).union(*(graph.op[n].writes for n in runs[:at]))
        further = [*runs[:at], *(i.name for i in graph.inverses)]
        again = [n for n in further if made.issuperset(graph.op[n].reads)]
        if again:
            runs.insert(at, rng.choice(again))
    return runs


@PROFILE
@given(seed=st.integers(0, 10**9), largest=st.sampled_from((3, 2**30, 2**55)))
def test_a_member_is_at_other_sizes_what_the_simulator_says(problems, seed, largest):
    rng = Random(seed)
    graph = with_inverses(problems.scrambled(rng, rng.randint(0, 25)), rng)
    family = PlanFamily(graph)
    plans = [plan_from_runs(graph, random_runs(graph, rng, rng.randint(0, 12)), "x") for _ in range(4)]
    for plan in plans:
        family.add(graph, plan)
    for other in (of_other_sizes(graph, rng, largest), renamed(of_other_sizes(graph, rng, largest))):
        amounts = amounts_of(other)
        found = family.evaluate(amounts)
        for member, peak, cost in zip(family.members, found.peaks, found.costs, strict=True):
            plan = family.plan(other, member)
            assert plan.estimate == simulate(other, plan.schedule)
            assert peak == plan.estimate.peak
            assert cost == pytest.approx(plan.estimate.cost, rel=1e-12)
            again = member_of(other, plan.schedule, "x")
            assert np.array_equal(again.steps, member.steps)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Run("no such op"), "runs 'no such op', which the problem does not have"),
        (Free("no such tensor"), "frees 'no such tensor', which no run has left resident"),
        (Free("x"), "frees 'x', which no run has left resident"),
        (Free("y"), "frees 'y', which no run has left resident"),
    ],
)
def test_a_schedule_that_the_problem_does_not_allow_is_refused_by_name(step, message):
    tensors = tuple(Tensor(name, 1) for name in ("x", "y"))
    graph = TrainingGraph("one op", tensors, ("x",), (), (Op("make", ("x",), ("y",), 1.0),))
    with pytest.raises(ProblemError, match=message):
        member_of(graph, (Run("make"), Free("y"), step), "by hand")


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_a_result_that_is_written_again_while_it_is_there_takes_no_more_bytes(problems, seed):
    rng = Random(seed)
    graph = problems.scrambled(rng, rng.randint(1, 20))
    steps = list(no_recompute(graph).schedule)
    for at in sorted((k for k, step in enumerate(steps) if isinstance(step, Run)), reverse=True):
        if rng.random() < 0.5:
            steps.insert(at, steps[at])  # the op runs twice, and nothing is freed between
    family = PlanFamily(graph)
    family.add(graph, replace(no_recompute(graph), schedule=tuple(steps)))
    other = of_other_sizes(graph, rng)
    peaks = family.evaluate(amounts_of(other)).peaks
    for member, peak in zip(family.members, peaks, strict=True):
        plan = family.plan(other, member)
        assert plan.estimate == simulate(other, plan.schedule)
        assert peak == plan.estimate.peak


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_the_best_is_the_cheapest_that_fits(problems, seed):
    rng = Random(seed)
    graph = problems.scrambled(rng, rng.randint(1, 20))
    family = PlanFamily(graph)
    plans = [no_recompute(graph)]
    for _ in range(6):
        plans.append(plan_from_runs(graph, random_runs(graph, rng, 8), "x"))
        family.add(graph, plans[-1])
    other = of_other_sizes(graph, rng)
    there = [plan_from_runs(other, runs_of(p.schedule), "x") for p in plans]
    for budget in (0, *(p.estimate.peak + d for p in there for d in (-1, 0))):
        best = family.best_plan(other, budget)
        fitting = [p.estimate for p in there if p.estimate.peak <= budget]
        over = [p.estimate.peak for p in there if p.estimate.peak > budget]
        assert (best is None) is (not fitting)
        if best is not None:
            assert best.budget == budget
            assert best.estimate.peak <= budget
            assert best.estimate.cost == pytest.approx(min(e.cost for e in fitting))
        nearest = family.nearest_over(amounts_of(other), budget)
        assert (nearest is None) is (not over)
        if nearest is not None:
            assert nearest.estimate(amounts_of(other)).peak == min(over)
    least = family.least(amounts_of(other)).estimate(amounts_of(other))
    assert least.peak == min(p.estimate.peak for p in there)


def test_what_runs_again_is_not_chosen_where_it_may_not(problems):
    graph = problems.chain(8)
    again = max(ApproxDP().curve(graph, ()), key=lambda p: p.estimate.reruns)
    family = PlanFamily(graph)
    family.add(graph, again)
    budget = again.estimate.peak
    assert family.best_plan(graph, budget) is not None
    first = next(name for name in runs_of(again.schedule) if runs_of(again.schedule).count(name) > 1)
    strict = replace(graph, never_rerun=(first,))
    assert strict.structure == graph.structure
    assert family.best_plan(strict, budget) is None
    assert family.best_plan(strict, no_recompute(strict).estimate.peak) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda g: replace(g, ops=(*g.ops, Op("more", g.ops[0].writes, (), 1.0))),
        lambda g: replace(g, outputs=(*g.outputs, g.ops[0].writes[0])),
        lambda g: replace(g, ordered=(g.ops[0].name,)),
        lambda g: replace(g, inverses=(Op("i", g.ops[1].writes, g.ops[0].writes, 1.0),)),
        lambda g: replace(g, ops=(replace(g.ops[0], phase="backward"), *g.ops[1:])),
        lambda g: replace(g, ops=(*g.ops[:-1], replace(g.ops[-1], reads=g.ops[0].writes))),
    ],
    ids=["op", "output", "order", "inverse", "phase", "reads"],
)
def test_other_ops_or_storages_are_another_structure(problems, change):
    graph = problems.chain(4)
    family, other = PlanFamily(graph), change(graph)
    assert other.structure != graph.structure
    with pytest.raises(ProblemError, match="has other ops or storages"):
        family.add(other, no_recompute(other))
    with pytest.raises(ProblemError, match="has other ops or storages"):
        family.best_plan(other, 10**9)


def test_names_sizes_and_costs_are_no_part_of_the_structure(problems):
    graph = problems.residual((1, 1))
    assert renamed(of_other_sizes(graph, Random(1))).structure == graph.structure


def test_a_family_is_bounded_and_keeps_both_ends_of_each_front(problems, monkeypatch):
    monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, members=9))
    graph = problems.residual((2, 2))
    rng = Random(3)
    sizes = [graph, *(of_other_sizes(graph, rng, 10**6) for _ in range(2))]
    curves = [ApproxDP().curve(one, ()) for one in sizes]
    family = PlanFamily(graph)
    for one, plans in zip(sizes, curves, strict=True):
        for plan in plans:
            family.add(one, plan)
    assert sum(map(len, curves)) > len(family) == 9
    for one in sizes:
        here = pareto(plan_from_runs(one, runs_of(p.schedule), "x") for plans in curves for p in plans)
        estimates = [m.estimate(amounts_of(one)) for m in family.members]
        assert min(e.peak for e in estimates) == here[-1].estimate.peak
        assert min(e.cost for e in estimates) == pytest.approx(here[0].estimate.cost)


def test_sizes_met_are_bounded_and_the_largest_stays(problems):
    graph = problems.chain(4)
    family = PlanFamily(graph)
    large = replace(graph, tensors=tuple(replace(t, bytes=100 * t.bytes) for t in graph.tensors))
    family.add(large, no_recompute(large))
    for k in range(10):
        one = replace(graph, tensors=tuple(replace(t, bytes=t.bytes + k) for t in graph.tensors))
        family.add(one, no_recompute(one))
    assert len(family) == 1
    assert len(family.met) == module.LIMITS.sizes_met
    assert max(met.total for met in family.met) == amounts_of(large).total
    assert family.met[-1].equals(amounts_of(one))


def test_copies_and_pickles_have_the_members(problems):
    graph = problems.chain(8)
    family = PlanFamily(graph)
    for plan in ApproxDP().curve(graph, ()):
        family.add(graph, plan)
    for other in (copy.deepcopy(family), pickle.loads(pickle.dumps(family))):
        assert len(other) == len(family) > 1
        budget = ApproxDP().curve(graph, ())[-1].estimate.peak
        assert other.best_plan(graph, budget) == family.best_plan(graph, budget)
