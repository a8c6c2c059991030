"""Annealing and auto: plans are valid within the budget, optimal on tiny problems and repeatable; an interrupted
search returns its best plan.
"""

from __future__ import annotations

import math
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph, problem_to_json
from rematplan.planner.annealing.annealer import ALL_MOVES, Annealer
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.annealing.state import BUDGET
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import peak_op, plan_from_runs, plan_to_json
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.search_rules import SearchRules
from rematplan.planner.core.strategy import Enough
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.ilp import ILP

LAWS = settings(derandomize=True, deadline=None, max_examples=30)


def network(layers, rng=None, phases=True):
    """A forward chain with skips and its gradient; sizes and costs by chance, or all one."""
    rng = rng or random.Random(0)
    size, cost = (lambda: rng.randint(1, 20)), (lambda: float(rng.randint(1, 20)))
    half = ("forward", "backward") if phases else (None, None)
    ops, tensors = [], {"x": 4, "g": 1}
    for i in range(layers):
        tensors[f"a{i}"] = size()
        reads = ("x",) if i == 0 else tuple(dict.fromkeys((f"a{i - 1}", f"a{rng.randrange(i)}")))
        ops.append(Op(f"f{i}", reads, (f"a{i}",), cost(), rng.choice([0, 3]), half[0]))
    for i in reversed(range(layers)):
        tensors[f"d{i}"] = tensors[f"a{i}"]
        above = (f"d{i + 1}",) if i + 1 < layers else ()
        ops.append(Op(f"b{i}", (*above, f"a{i}", *ops[i].reads[:1]), (f"d{i}",), cost(), 0, half[1]))
    used = dict.fromkeys(t for o in ops for t in (*o.reads, *o.writes))
    sizes = tuple(Tensor(t, tensors[t]) for t in used)
    return TrainingGraph("network", sizes, ("x",), ("d0",), tuple(ops))


def peak_of_base(graph):
    return plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak


@LAWS
@given(st.integers(0, 10**6), st.integers(2, 4), st.floats(0.5, 1), st.booleans())
def test_anneal_and_auto_reach_the_exhaustive_optimum(seed, layers, share, phases):
    graph = network(layers, random.Random(seed), phases)
    budget = int(share * peak_of_base(graph))
    optimum = exhaustive(graph, budget, 10**6)
    if optimum.cost == math.inf:
        for strategy in (Anneal(moves=20_000), Auto(moves=200_000)):
            with pytest.raises(InfeasibleBudget) as caught:
                strategy.plan(graph, budget)
            assert budget < caught.value.smallest <= peak_of_base(graph)
        return
    for plan in (Anneal(moves=60_000).plan(graph, budget), Auto(moves=200_000).plan(graph, budget)):
        assert plan.estimate.peak <= budget
        assert plan.estimate.cost == pytest.approx(optimum.cost)
    assert plan.status == "optimal"
    assert plan.lower_bound == pytest.approx(plan.estimate.overhead)


def test_a_dropped_tensor_is_recomputed_while_its_inputs_are_resident():
    """With skips that pays; from runs just before the next reads (0.163 at best) no shifts lead there."""
    graph = network(24, random.Random(4))
    for seed in range(3):
        plan = Anneal(moves=40_000, seed=seed).plan(graph, peak_of_base(graph) // 2)
        assert plan.estimate.overhead < 0.161


@pytest.mark.parametrize("layers", [12, 30])
def test_plans_pass_the_independent_checker(layers, checker):
    graph = network(layers, random.Random(layers))
    for share in (0.9, 0.75):
        plan = Auto(moves=200_000).plan(graph, int(share * peak_of_base(graph)))
        replayed = checker.replay(problem_to_json(graph), plan_to_json(plan))
        assert replayed["peak"] == plan.estimate.peak <= plan.budget
        assert plan.lower_bound is not None
        assert 0 <= plan.lower_bound <= plan.estimate.overhead


def test_a_share_of_few_moves_is_still_counted_in_moves():
    """With no moves left the time limit would apply, and plans would depend on the machine."""
    assert Anneal(moves=3).share(8).moves == 1
    assert Anneal().share(8).moves == 0  # the time limit applies


def test_equal_seeds_and_moves_give_equal_plans():
    graph = network(20)
    budget = int(0.6 * peak_of_base(graph))
    first, again, other = (Anneal(moves=8000, seed=s).plan(graph, budget) for s in (3, 3, 4))
    assert first.schedule == again.schedule
    assert first.schedule != other.schedule


def test_keep_order_keeps_the_order_of_first_runs():
    graph = network(20, phases=False)
    plan = Anneal(moves=8000, keep_order=True).plan(graph, int(0.6 * peak_of_base(graph)))
    firsts = list(dict.fromkeys(runs_of(plan.schedule)))
    assert firsts == [op.name for op in graph.ops]
    plan = Auto(moves=100_000, keep_order=True).plan(graph, int(0.6 * peak_of_base(graph)))
    assert list(dict.fromkeys(runs_of(plan.schedule))) == [op.name for op in graph.ops]


@pytest.mark.parametrize("reason", [KeyboardInterrupt, Enough])
def test_an_interrupted_search_returns_its_best_plan(reason):
    graph = network(40)
    budget = int(0.6 * peak_of_base(graph))

    def interrupt(fraction, text):
        if text.startswith("overhead"):
            raise reason

    for strategy in (Anneal(), Auto()):
        plan = strategy.plan(graph, budget, interrupt)
        assert plan.estimate.peak <= budget


def test_the_curve_is_monotone_in_the_budget():
    graph = network(25)
    peak = peak_of_base(graph)
    for strategy in (Anneal(moves=40_000), Auto(moves=100_000)):
        plans = strategy.curve(graph, [int(peak * f) for f in (0.5, 0.6, 0.7, 0.8, 0.9, 1)])
        assert len(plans) > 3
        peaks, costs = [p.estimate.peak for p in plans], [p.estimate.cost for p in plans]
        assert peaks == sorted(peaks, reverse=True)
        assert costs == sorted(costs)


def test_a_later_plan_for_a_larger_budget_is_never_worse():
    graph = network(20)
    peak = peak_of_base(graph)
    plans = []
    for share in (0.6, 0.65, 0.8):
        plans.append(Auto(moves=10_000).plan(graph, int(peak * share), starts=plans))
    overheads = [plan.estimate.overhead for plan in plans]
    assert overheads == sorted(overheads, reverse=True)


def test_smallest_peak_of_a_chain():
    graph = network(30)
    plan = cheapest_near_smallest_peak(graph, moves=200_000)
    assert plan.estimate.peak < 0.75 * peak_of_base(graph)
    assert plan.budget == plan.estimate.peak
    assert peak_op(plan) in {op.name for op in graph.ops}
    tiny = network(4)
    found = cheapest_near_smallest_peak(tiny, moves=60_000).estimate.peak
    assert exhaustive(tiny, found, 10**6).cost < math.inf
    assert exhaustive(tiny, found - 1, 10**6).cost == math.inf


def test_the_smallest_peak_keeps_the_order_that_must_be_kept():
    """Four large tensors are made before any is folded: kept in that order each of them runs twice."""
    large = [Op(f"make{i}", ("x",), (f"large{i}",), 1.0) for i in range(4)]
    small = [Op(f"fold{i}", (f"large{i}",), (f"small{i}",), 1.0) for i in range(4)]
    sizes = {"x": 1} | {f"large{i}": 8 for i in range(4)} | {f"small{i}": 1 for i in range(4)}
    tensors = tuple(Tensor(name, size) for name, size in sizes.items())
    outputs = tuple(f"small{i}" for i in range(4))
    graph = TrainingGraph("folds", tensors, ("x",), outputs, (*large, *small))
    kinds = (SearchRules(keep_order=keep) for keep in (False, True))
    free, kept = (cheapest_near_smallest_peak(graph, moves=40_000, rules=kind) for kind in kinds)
    assert (free.estimate.peak, free.estimate.reruns) == (1 + 8 + 4, 0)
    assert list(dict.fromkeys(runs_of(kept.schedule))) == [op.name for op in graph.ops]
    assert (kept.estimate.peak, kept.estimate.reruns) == (1 + 8 + 4, 4)


def test_a_search_that_finds_no_plan_reports_the_smallest_peak_it_found():
    graph = network(10)
    with pytest.raises(InfeasibleBudget, match="smallest found"):
        Anneal(moves=5000).plan(graph, graph.input_bytes + 1)


def test_tidying_removes_every_rerun_that_the_budget_does_not_need():
    graph = network(20)
    base = [op.name for op in graph.ops]
    annealer = Annealer(graph)
    wasteful = [name for name in base for _ in range(2)]
    assert annealer.tidied(wasteful, 2 * peak_of_base(graph)) == base
    assert annealer.tidied(wasteful, graph.input_bytes) == wasteful  # over its budget: left as it is
    plan = Anneal(moves=8000).plan(graph, int(0.6 * peak_of_base(graph)))
    tidy = plan_from_runs(graph, annealer.tidied(runs_of(plan.schedule), plan.budget), "tidy")
    assert tidy.estimate.peak <= plan.budget
    assert tidy.estimate.cost == plan.estimate.cost  # a search tidies what it returns


def test_the_best_sequence_may_be_much_longer_than_the_present_one():
    tensors, ops = (Tensor("a", 8), Tensor("b", 8)), (Op("a", (), ("a",), 1.0), Op("b", ("a",), ("b",), 1.0))
    annealer = Annealer(TrainingGraph("two ops", tensors, (), ("b",), ops))
    long = ["a"] * 3000 + ["b"]
    annealer.load(long, 16)
    annealer.state.value[BUDGET] = 8.0  # the present sequence does not fit
    annealer._reseat(np.array([0, 1]))
    assert annealer.current() == ["a", "b"]
    assert annealer.best() == long
    annealer.cool(100, 1.0, 0.1)
    assert annealer.best() == long


@pytest.mark.parametrize("search", [Auto(moves=10_000), Anneal(moves=100), ILP(time_limit=0.1)])
def test_a_search_is_never_worse_than_its_start(search):
    graph = network(20)
    budget = int(0.6 * peak_of_base(graph))
    start = Anneal(moves=60_000).plan(graph, budget)
    assert search.plan(graph, budget, starts=[start]).estimate.cost <= start.estimate.cost


def test_a_plan_depends_only_on_the_arguments():
    graph = network(30)
    budget = int(0.6 * peak_of_base(graph))
    alone = Anneal(moves=8000).plan(graph, budget)
    start = Anneal(moves=60_000).plan(graph, budget)
    Auto(moves=10_000).plan(graph, budget)
    assert Anneal(moves=8000).plan(graph, budget) == alone
    assert Anneal(moves=8000).plan(graph, budget, starts=[start]).estimate.cost < alone.estimate.cost


def test_a_refusal_reports_a_reachable_peak():
    graph = network(30)
    with pytest.raises(InfeasibleBudget) as caught:
        Auto(moves=200_000).plan(graph, graph.input_bytes + 1)
    assert caught.value.smallest < 0.8 * peak_of_base(graph)
    assert caught.value.plan.estimate.peak == caught.value.smallest
    again = Auto(moves=30_000).plan(graph, caught.value.smallest, starts=[caught.value.plan])
    assert again.estimate.peak <= caught.value.smallest


def side_by_side(chains, length):
    """Chains that meet at the end, given in the order of highest peak: all chains' first ops, then all second ones."""
    ops = [
        Op(f"o{i}_{k}", (f"t{i}_{k - 1}",) if k else (), (f"t{i}_{k}",), 1.0)
        for k in range(length)
        for i in range(chains)
    ]
    ends = tuple(f"t{i}_{length - 1}" for i in range(chains))
    sizes = (Tensor(f"t{i}_{k}", 1 if k == length - 1 else 9) for k in range(length) for i in range(chains))
    last = Op("end", ends, ("out",), 1.0)
    return TrainingGraph("side by side", (*sizes, Tensor("out", 1)), (), ("out",), (*ops, last))


@pytest.mark.parametrize("effort", [{"moves": 30_000}, {"time_limit": 10.0}])
def test_nothing_is_recomputed_if_another_order_fits(effort):
    graph = side_by_side(12, 5)  # one chain after another: two tensors of 9, and eleven of 1
    assert peak_of_base(graph) > 110
    assert Anneal(**effort).plan(graph, 29).estimate.overhead == 0
    with pytest.raises(InfeasibleBudget):
        Anneal(moves=2000).plan(graph, 17)


def test_the_second_thread_ends_with_the_search(monkeypatch):
    graph = side_by_side(12, 5)
    begun = []
    rounds = Search._rounds
    monkeypatch.setattr(
        Search, "_rounds", lambda self, effort: (begun.append(self.seed), rounds(self, effort))
    )
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before = threading.active_count()
    search = Search(graph, 29, seed=5, enough=lambda overhead: overhead <= 0)
    assert search.run([], Effort(60.0)).estimate.peak <= 29
    assert sorted(begun) == [5, 6]
    assert threading.active_count() == before
    assert search.twin.best is None or search.overhead <= search.twin.best.estimate.overhead


@pytest.mark.parametrize("stage", ["_stage", "_raise_price_slowly"])
def test_a_stopped_search_ends_within_a_stage_that_is_longer_than_what_is_left(stage: str) -> None:
    graph = network(12)
    search = Search(graph, peak_of_base(graph) // 2)
    search.prepare([])
    search.annealer.load(search.base, search.budget)
    effort, slices = Effort(60.0), []

    def stop(*_: object) -> None:
        slices.append(effort.done)
        effort.stop()
        assert len(slices) < 9

    search.report = stop
    if stage == "_stage":
        search._stage(ALL_MOVES, (1.0, 0.1), 1000.0, effort, lambda _share: None)
    else:
        search.annealer.load(search.base, 1)
        search._raise_price_slowly(1.0, 1000.0 / search.schedule.rising_share, effort)
    assert len(slices) == 1


def test_a_search_ends_if_the_needed_ops_fit_without_recomputation() -> None:
    """An op whose result nobody reads takes more than the budget alone; without it there is nothing to lower."""
    sizes = {"x": 13, "unread": 40, "a": 2, "b": 0, "d": 13}
    graph = TrainingGraph(
        "unread",
        tuple(Tensor(t, n) for t, n in sizes.items()),
        ("x",),
        ("d",),
        (
            Op("idle", ("x",), ("unread",), 7.0, 9, "forward"),
            Op("f", ("x",), ("a",), 2.0, 0, "forward"),
            Op("g", ("a", "x"), ("b",), 1.0, 0, "backward"),
            Op("h", ("b", "x"), ("d",), 0.0, 0, "backward"),
        ),
    )
    plan = Search(graph, 57).run([], Effort(moves=500))
    assert plan is not None
    assert runs_of(plan.schedule) == ["f", "g", "h"]
