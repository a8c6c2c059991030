"""The plan store in memory and on disk: later processes start from stored plans, and damaged files are ignored."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest

from rematplan.ir import InfeasibleBudget, Op
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches import plan_store as module
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.ilp import ILP
from rematplan.plans.budget_searches import plan_within

INSTANT = Auto(time_limit=0.0)


def within(strategy, graph, budget):
    """The strategy's plan as in a process of its own: nothing is known but what is on disk."""
    return plan_within(strategy, graph, budget, store=PlanStore())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rematplan" / "plans"


def base(graph):
    return plan_from_runs(graph, [op.name for op in graph.ops], "base")


def again(graph):
    """The problem as another process would see it: nothing is remembered of it."""
    return replace(graph)


@pytest.mark.parametrize("search", [Auto(time_limit=0.5), Anneal(time_limit=0.5), ILP(time_limit=1)])
def test_a_later_process_is_never_worse_at_the_same_or_a_larger_budget(problems, search):
    graph = problems.residual((1, 1))
    peak = base(graph).estimate.peak
    found = within(search, graph, int(0.6 * peak))
    for share in (0.6, 0.61, 0.7):
        later = within(INSTANT, again(graph), int(share * peak))
        assert later.estimate.cost <= found.estimate.cost
        assert later.budget == int(share * peak)


def test_a_problem_with_inverses_starts_from_the_plan_without_them(problems):
    plain = problems.residual((1, 1))
    sums = [op for op in plain.ops if op.name.startswith("add") and op.phase == "forward"]
    graph = replace(
        plain, inverses=tuple(Op(f"un{op.name}", (*op.writes, op.reads[1]), op.reads[:1], 1.0) for op in sums)
    )
    assert graph.inverses
    budget = int(0.7 * base(plain).estimate.peak)
    found = within(Auto(time_limit=0.5), plain, budget)
    assert within(INSTANT, again(graph), budget).estimate.cost <= found.estimate.cost


def test_other_sizes_or_costs_are_another_problem(problems):
    graph = problems.chain(6)
    PlanStore().save(graph, base(graph))
    assert PlanStore().saved(again(graph)) == (base(graph),)
    dearer = replace(graph, ops=tuple(replace(op, cost=op.cost + 1) for op in graph.ops))
    larger = replace(graph, tensors=tuple(replace(t, bytes=t.bytes + 1) for t in graph.tensors))
    assert PlanStore().saved(dearer) == PlanStore().saved(larger) == ()


def test_without_reuse_nothing_is_read_or_written(problems, folder):
    graph = problems.chain(8)
    PlanStore().save(graph, base(graph))
    budget = base(graph).estimate.peak
    assert within(Auto(), again(graph), budget).strategy == "base"
    (file,) = folder.iterdir()
    written = file.read_text()
    assert within(Auto(reuse=False), again(graph), budget).strategy != "base"
    with pytest.raises(InfeasibleBudget):
        within(Auto(time_limit=0.1, reuse=False), again(graph), graph.input_bytes + 1)
    assert file.read_text() == written


def test_plans_over_the_budget_are_stored_too(problems):
    graph = problems.chain(8)
    with pytest.raises(InfeasibleBudget) as caught:
        within(Auto(time_limit=0.1), graph, graph.input_bytes + 1)
    named = {caught.value.smallest, caught.value.cheap}
    assert {p.estimate.peak for p in PlanStore().saved(again(graph))} == named


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[]",
            "null",
            "3",
            "[[1]]",
            "\0",
            '{"plans": 3, "searches": 3}',
            '{"plans": [[1]], "searches": [[1]]}',
        ),
        *('{"plans": [["a", [99999]]]}', '{"plans": [["a", [0, "x"]]]}', '{"plans": [["a", [3]]]}'),
    ],
)
def test_a_damaged_file_counts_as_missing(problems, folder, text):
    graph = problems.chain(4)
    PlanStore().save(graph, base(graph))
    (file,) = folder.iterdir()
    file.write_text(text)
    assert PlanStore().saved(again(graph)) == ()
    assert PlanStore().solved(again(graph), 2**40, math.inf, 0.0) is None
    PlanStore().save(graph, base(graph))
    assert PlanStore().saved(again(graph)) == (base(graph),)


def test_a_plan_of_a_known_gap_needs_no_search_at_its_budget_and_at_smaller_ones_that_it_fits(problems):
    graph, store = problems.chain(8), PlanStore()
    peak, runs = base(graph).estimate.peak, [op.name for op in graph.ops]
    dear = replace(plan_from_runs(graph, [*runs[:2], runs[0], *runs[2:]], "dear"), budget=peak + 9)
    overhead = dear.estimate.overhead
    store.save(graph, replace(dear, lower_bound=overhead - 0.01))
    for budget, gap, known in ((peak + 9, 0.011, True), (peak + 9, 0.009, False), (peak + 10, 0.011, False)):
        found = PlanStore().solved(again(graph), budget, gap, seconds=1.0)
        assert (found is not None) is known
    assert PlanStore().solved(again(graph), dear.estimate.peak, 0.011, 1.0).lower_bound == overhead - 0.01
    assert PlanStore().solved(again(graph), dear.estimate.peak - 1, 0.011, 1.0) is None


def test_an_equally_long_search_is_not_repeated(problems):
    graph, store = problems.chain(8), PlanStore()
    plan = replace(base(graph), budget=base(graph).estimate.peak)
    store.save(graph, plan, seconds=5.0)
    assert store.solved(again(graph), plan.budget, 0.0, 5.0) is not None
    assert store.solved(again(graph), plan.budget, 0.0, 5.1) is None
    assert store.solved(again(graph), plan.budget + 1, 0.0, 5.0) is None


def test_dominated_plans_are_dropped_and_the_latest_come_first(problems):
    graph = problems.chain(8)
    names = [op.name for op in graph.ops]
    wasteful = plan_from_runs(graph, [names[0], *names], "wasteful")
    lean = Anneal(moves=20_000).plan(graph, int(0.7 * base(graph).estimate.peak))
    for plan in (wasteful, base(graph), lean, wasteful):
        PlanStore().save(graph, plan)
    assert [p.strategy for p in PlanStore().saved(graph)] == ["anneal", "base"]


def test_the_size_of_a_file_is_limited(problems, folder, monkeypatch):
    monkeypatch.setattr(module, "PROBLEMS_KEPT", 3)
    for length in range(3, 9):
        PlanStore().save(problems.chain(length), base(problems.chain(length)))
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setattr(module, "RUNS_KEPT", 1)
    graph = problems.chain(8)
    lean = Anneal(moves=20_000).plan(graph, int(0.7 * base(graph).estimate.peak))
    PlanStore().save(graph, base(graph))
    PlanStore().save(graph, lean)
    assert [p.strategy for p in PlanStore().saved(graph)] == ["anneal"]


def test_a_folder_that_cannot_be_created_is_no_error(problems, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    graph = problems.chain(6)
    PlanStore().save(graph, base(graph))
    assert PlanStore().saved(graph) == ()


def test_a_plan_is_returned_only_for_its_problem_and_budget(problems):
    graph, store = problems.chain(8), PlanStore()
    peak = base(graph).estimate.peak
    assert not store
    store.put(graph, peak, base(graph))
    store.put(graph, "min", base(graph))
    assert store
    for budget in (peak, "min"):
        assert store.get(again(graph), budget) == replace(base(graph), fingerprint=graph.fingerprint)
    larger = replace(graph, tensors=tuple(replace(t, bytes=t.bytes + 1) for t in graph.tensors))
    slower = replace(graph, ops=tuple(replace(op, workspace=1) for op in graph.ops))
    assert store.get(graph, peak + 1) is store.get(larger, peak) is store.get(slower, peak) is None


def test_a_problem_with_other_costs_gets_the_plan_without_its_bound(problems):
    graph, store = problems.chain(8), PlanStore()
    store.put(graph, 99, replace(base(graph), lower_bound=0.0, status="optimal", near=((1, 0.5),)))
    dearer = replace(graph, ops=tuple(replace(op, cost=op.cost + 1) for op in graph.ops))
    found = store.get(dearer, 99)
    assert found.schedule == base(graph).schedule
    assert found.estimate == base(dearer).estimate
    assert (found.lower_bound, found.status, found.near) == (None, "feasible", ())


def scaled(graph, factor):
    return replace(graph, tensors=tuple(replace(t, bytes=int(t.bytes * factor)) for t in graph.tensors))


def test_the_latest_plans_are_transferred_to_other_structures(problems):
    graph, store = problems.chain(8), PlanStore()
    for length in (3, 4, 5, 6, 7):
        store.put(problems.chain(length), 1, base(problems.chain(length)))
    assert len(store.nearest(graph)) == module.NEAREST
    assert {p.estimate for p in store.nearest(graph)} == {base(graph).estimate}
    assert store.serving(graph, 10**9) is None
    assert store.starts(graph, 10**9) == ()


def test_the_cheapest_plan_of_any_size_serves_another(problems):
    graph, store = problems.chain(8), PlanStore()
    half = scaled(graph, 0.5)
    plans = ApproxDP().curve(graph, ())
    for plan in plans:
        store.put(graph, plan.estimate.peak, plan)
    here = [plan_from_runs(half, runs_of(p.schedule), p.strategy) for p in plans]
    assert {p.schedule for p in here} <= {p.schedule for p in store.nearest(half)}
    for plan in here:
        assert store.serving(half, plan.estimate.peak).estimate.cost == plan.estimate.cost
    assert store.serving(half, here[-1].estimate.peak - 1) is None


def test_starts_are_of_other_sizes_the_cheapest_that_fit_and_one_that_does_not(problems, monkeypatch):
    monkeypatch.setattr(module, "STARTS", 2)
    graph, store = problems.residual((2, 2)), PlanStore()
    half = scaled(graph, 0.5)
    for plan in ApproxDP().curve(graph, ()):
        store.put(graph, plan.estimate.peak, plan)
    every = sorted({p.estimate for p in store.nearest(half)}, key=lambda e: e.cost)
    budget = every[len(every) // 2].peak
    assert store.starts(graph, budget) == ()
    starts = [p.estimate for p in store.starts(half, budget)]
    assert starts[:2] == [e for e in every if e.peak <= budget][:2]
    assert starts[2].peak == min(e.peak for e in every if e.peak > budget)
    assert len(starts) == 3


def test_families_are_bounded_and_the_oldest_goes_first(problems, monkeypatch):
    monkeypatch.setattr(module, "FAMILIES", 2)
    store, graphs = PlanStore(), [problems.chain(length) for length in (4, 5, 6)]
    for k in (0, 1, 0, 2):
        store.put(graphs[k], 1, base(graphs[k]))
    assert [store.serving(graph, 10**9) is not None for graph in graphs] == [True, False, True]


def test_memory_is_bounded_and_the_oldest_goes_first(problems, monkeypatch):
    monkeypatch.setattr(module, "IN_MEMORY", 2)
    graph, store = problems.chain(8), PlanStore()
    for budget in (1, 2, 1, 3):
        store.put(graph, budget, base(graph))
    assert store.get(graph, 2) is None
    assert store.get(graph, 1) is not None
    assert store.get(graph, 3) is not None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_and_pickles_contain_the_plans_in_memory(problems, copied):
    graph, store = problems.chain(8), PlanStore()
    store.put(graph, 1, base(graph))
    twin = copied(store)
    assert twin.get(graph, 1) == store.get(graph, 1)
    assert twin.serving(graph, 10**9) == store.serving(graph, 10**9) is not None


def test_a_refusal_holds_for_smaller_budgets_and_for_no_longer_search(problems):
    graph, store = problems.chain(8), PlanStore()
    store.refuse(graph, InfeasibleBudget("auto", 100, 200, "searched"), 2.0)
    assert store.refusal(graph, 90, 2.0).budget == 90
    assert store.refusal(graph, 100, 1.0).smallest == 200
    assert store.refusal(graph, 101, 1.0) is None
    assert store.refusal(graph, 100, 30.0) is None
    store.refuse(graph, InfeasibleBudget("auto", 50, 200, "proven"), 2.0)
    assert store.refusal(graph, 50, 30.0).known == "proven"
    assert store.refusal(graph, 100, 30.0) is None
    assert pickle.loads(pickle.dumps(store)).refusal(graph, 50, 30.0).smallest == 200


def test_a_longer_search_is_made_after_a_short_one_found_nothing(problems):
    graph, store, made = problems.chain(8), PlanStore(), []

    @dataclass(frozen=True)
    class Slow(Anneal):
        def plan(self, graph, budget, progress=None, starts=()):
            made.append(self.time_limit)
            if self.time_limit < 10:
                raise InfeasibleBudget("slow", budget, 2 * budget, "searched")
            return base(graph)

    for limit in (1.0, 1.0, 30.0):
        with suppress(InfeasibleBudget):
            plan_within(Slow(time_limit=limit), graph, 10**6, store=store)
    assert made == [1.0, 30.0]
    assert store.get(graph, 10**6) is not None
