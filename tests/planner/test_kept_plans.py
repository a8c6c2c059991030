"""Plans kept on disk: a later process begins where an earlier one ended, and a bad file costs no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rematplan.ir import InfeasibleBudget, Op
from rematplan.planner.auto.strategy import Auto
from rematplan.planner.caches import plan_cache as module
from rematplan.planner.caches.plan_cache import keep_plan, kept_plans
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.ilp import ILP

INSTANT = Auto(time_limit=0.0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rematplan" / "plans"


def base(graph):
    return plan_from_runs(graph, [op.name for op in graph.ops], "base")


def again(graph):
    """The problem as another process would see it: nothing is remembered of it."""
    return replace(graph)


@pytest.mark.parametrize("search", [Auto(time_limit=0.5), Anneal(moves=50_000), ILP(time_limit=3)])
def test_a_later_process_is_never_worse_at_the_same_or_a_larger_budget(problems, search):
    graph = problems.residual((1, 1))
    peak = base(graph).estimate.peak
    found = search.plan(graph, int(0.6 * peak))
    for share in (0.6, 0.61, 0.7):
        later = INSTANT.plan(again(graph), int(share * peak))
        assert later.estimate.cost <= found.estimate.cost
        assert later.budget == int(share * peak)


def test_the_problem_with_inverses_begins_with_the_plain_ones_plan(problems):
    plain = problems.residual((1, 1))
    sums = [op for op in plain.ops if op.name.startswith("add") and op.phase == "forward"]
    graph = replace(
        plain, inverses=tuple(Op(f"un{op.name}", (*op.writes, op.reads[1]), op.reads[:1], 1.0) for op in sums)
    )
    assert graph.inverses
    budget = int(0.7 * base(plain).estimate.peak)
    found = Auto(time_limit=0.5).plan(plain, budget)
    assert INSTANT.plan(again(graph), budget).estimate.cost <= found.estimate.cost


def test_other_sizes_or_costs_are_another_problem(problems):
    graph = problems.chain(6)
    keep_plan(graph, base(graph))
    assert kept_plans(again(graph)) == (base(graph),)
    dearer = replace(graph, ops=tuple(replace(op, cost=op.cost + 1) for op in graph.ops))
    larger = replace(graph, tensors=tuple(replace(t, bytes=t.bytes + 1) for t in graph.tensors))
    assert kept_plans(dearer) == kept_plans(larger) == ()


def test_without_reuse_nothing_is_read_or_written(problems, folder):
    graph = problems.chain(8)
    keep_plan(graph, base(graph))
    (file,) = folder.iterdir()
    written = file.read_text()
    budget = base(graph).estimate.peak
    assert Auto().plan(again(graph), budget).strategy == "base"
    assert Auto(reuse=False).plan(again(graph), budget).strategy != "base"
    with pytest.raises(InfeasibleBudget):
        Auto(time_limit=0.1, reuse=False).plan(again(graph), graph.input_bytes + 1)
    assert file.read_text() == written


def test_what_does_not_fit_is_kept_too(problems):
    graph = problems.chain(8)
    with pytest.raises(InfeasibleBudget) as caught:
        Auto(time_limit=0.1).plan(graph, graph.input_bytes + 1)
    assert [p.estimate.peak for p in kept_plans(again(graph))] == [caught.value.smallest]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", "[[1]]", '[["a", [99999]]]', '[["a", [0, "x"]]]', '[["a", [3]]]', "\0"],
)
def test_a_damaged_file_counts_as_none(problems, folder, text):
    graph = problems.chain(4)
    keep_plan(graph, base(graph))
    (file,) = folder.iterdir()
    file.write_text(text)
    assert kept_plans(again(graph)) == ()
    keep_plan(graph, base(graph))
    assert kept_plans(again(graph)) == (base(graph),)


def test_plans_worse_in_every_way_are_dropped_and_the_latest_come_first(problems):
    graph = problems.chain(8)
    names = [op.name for op in graph.ops]
    wasteful = plan_from_runs(graph, [names[0], *names], "wasteful")
    lean = Anneal(moves=20_000).plan(graph, int(0.7 * base(graph).estimate.peak))
    for plan in (wasteful, base(graph), lean, wasteful):
        keep_plan(graph, plan)
    assert [p.strategy for p in kept_plans(graph)] == ["anneal", "base"]


def test_no_more_is_kept_than_is_soon_read(problems, folder, monkeypatch):
    monkeypatch.setattr(module, "PROBLEMS_KEPT", 3)
    for length in range(3, 9):
        keep_plan(problems.chain(length), base(problems.chain(length)))
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setattr(module, "RUNS_KEPT", 1)
    graph = problems.chain(8)
    lean = Anneal(moves=20_000).plan(graph, int(0.7 * base(graph).estimate.peak))
    keep_plan(graph, base(graph))
    keep_plan(graph, lean)
    assert [p.strategy for p in kept_plans(graph)] == ["anneal"]


def test_a_folder_that_cannot_be_made_is_no_error(problems, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    graph = problems.chain(6)
    keep_plan(graph, base(graph))
    assert kept_plans(graph) == ()
