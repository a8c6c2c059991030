"""The smallest peak: never above a plan that is known, and never above what another budget finds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import problems
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.annealing_search import DEAR, Search
from rematplan.planner.annealing.falling_budget import plans_down_to
from rematplan.planner.auto import auto_session, block_starts, min_budget_plan
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.eviction import EVICTION, fitted, lower_by_eviction, plan_by_eviction
from rematplan.planner.auto.eviction_simulation import Simulation, random_policy, tables_of
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.auto.min_budget_plan import MIN_BUDGET, cheapest_near_smallest_peak
from rematplan.planner.auto.rungs import rungs_above
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak, find_smallest_peak_in_stages
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.peak_ladder import knee
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Enough
from rematplan.planner.least.near_least import plan_near_least
from rematplan.planner.registry import strategy
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.nested_dp import NestedDP
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budget_searches import least_plan, plan_within


def dense(layers: int, growth: int = 4096) -> TrainingGraph:
    """Each layer reads all earlier ones, by way of two tensors that are several times as large as its result."""
    tensors, ops, made = [Tensor("x", growth)], [], ["x"]
    for k in range(layers):
        sizes = (("cat", growth * len(made)), ("wide", 4 * growth), ("out", growth))
        tensors += [Tensor(f"{name}{k}", size) for name, size in sizes]
        ops.append(Op(f"cat{k}", tuple(made), (f"cat{k}",), 1.0, phase="forward"))
        ops.append(Op(f"wide{k}", (f"cat{k}",), (f"wide{k}",), 5.0, phase="forward"))
        ops.append(Op(f"out{k}", (f"wide{k}",), (f"out{k}",), 5.0, phase="forward"))
        made.append(f"out{k}")
    given = {name: [] for name in made}
    last = made[-1]
    for k in reversed(range(layers)):
        grads = given[f"out{k}"] or [last]
        tensors += [
            Tensor(f"dwide{k}", 4 * growth),
            Tensor(f"dcat{k}", growth * (k + 1)),
            Tensor(f"dw{k}", 8),
        ]
        reads = (*grads, f"wide{k}")
        ops.append(Op(f"back_out{k}", reads, (f"dwide{k}", f"dw{k}"), 9.0, phase="backward"))
        ops.append(Op(f"back_cat{k}", (f"dwide{k}", f"cat{k}"), (f"dcat{k}",), 9.0, phase="backward"))
        for name in made[: k + 1]:
            given[name].append(f"dcat{k}")
    outputs = tuple(f"dw{k}" for k in range(layers))
    return TrainingGraph("dense", tuple(tensors), ("x",), outputs, tuple(ops))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_deferred_outputs_are_made_again_within_the_budget(seed: int, ordered: bool) -> None:
    graph = heavy_last(6)
    graph = replace(graph, ordered=tuple(op.name for op in graph.ops) if ordered else ())
    plain, source = tables_of(graph), random.Random(seed)
    tables = tables_of(graph, len(plain.peaks))
    assert list(plain.peaks) == sorted(set(plain.peaks), reverse=True)
    budget = plain.peaks[0] - 100
    policy = random_policy(source)._replace(backward=False)
    assert not Simulation(plain, budget, policy, source, Effort()).run()
    simulation = Simulation(tables, budget, policy, source, Effort())
    assert simulation.run()
    runs = [tables.names[o] for o in simulation.runs]
    assert Annealer(graph).accepts(runs)
    assert plan_from_runs(graph, runs, "eviction").peak <= budget


def test_a_further_pass_is_tried_where_one_hardly_fits() -> None:
    graph = heavy_last(6)
    one, *_ = tables_of(graph).peaks
    policy = random_policy(random.Random(0))._replace(passes=2)
    assert fitted(graph, one + 1, policy, False)[0] is tables_of(graph, 2)
    assert fitted(graph, 2 * one, policy, False)[0] is tables_of(graph)
    assert fitted(graph, one + 1, policy._replace(passes=1), False)[0] is tables_of(graph)


def test_results_of_the_backward_are_evicted_where_they_cannot_all_stay() -> None:
    graph = heavy_last(6)
    one, *_, least = tables_of(graph).peaks
    policy = random_policy(random.Random(0))._replace(passes=1, backward=False)
    assert not fitted(graph, one, policy, False)[1].backward
    assert not fitted(graph, least, policy, False)[1].backward
    assert fitted(graph, least - 1, policy, False)[1].backward
    assert fitted(graph, one - 1, policy, True)[1].backward
    assert fitted(graph, one - 1, policy._replace(passes=0), False)[1].backward


def heavy_last(layers: int) -> TrainingGraph:
    """A chain with the largest tensors first and the largest parameters last, so that gradients are in the way."""
    tensors, ops = [Tensor("x", 10), Tensor("f0", 100), Tensor("d0", 100), Tensor("dw0", 1)], []
    ops.append(Op("f0", ("x",), ("f0",), 1.0, phase="forward"))
    for k in range(1, layers):
        tensors += [Tensor(f"f{k}", 10), Tensor(f"d{k}", 10), Tensor(f"dw{k}", 50)]
        ops.append(Op(f"f{k}", (f"f{k - 1}",), (f"f{k}",), 1.0, phase="forward"))
    for k in reversed(range(1, layers)):
        given = (f"d{k + 1}",) if k + 1 < layers else ()
        ops.append(Op(f"b{k}", (f"f{k - 1}", f"f{k}", *given), (f"d{k}", f"dw{k}"), 1.0, phase="backward"))
    ops.append(Op("b0", ("x", "f0", "d1"), ("d0", "dw0"), 1.0, phase="backward"))
    return TrainingGraph(
        "heavy last", tuple(tensors), ("x",), tuple(f"dw{k}" for k in range(layers)), tuple(ops)
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_simulation_keeps_its_budget_and_its_order(problems, seed):
    for graph in (dense(5), problems.unet(3), problems.residual((2, 2))):
        source, base = random.Random(seed), no_recompute(graph).estimate.peak
        found = 0
        for share in (1.0, 0.8, 0.6, 0.5):
            budget = int(share * base)
            simulation = Simulation(tables_of(graph), budget, random_policy(source), source, Effort())
            if not simulation.run():
                continue
            found += 1
            runs = [tables_of(graph).names[o] for o in simulation.runs]
            assert plan_from_runs(graph, runs, "eviction").estimate.peak <= budget
            firsts = list(dict.fromkeys(runs))
            assert firsts == [op.name for op in graph.ops if op.name in firsts]
        assert found


def test_without_pressure_nothing_is_recomputed(problems):
    graph = problems.unet(3)
    plan = plan_by_eviction(graph, no_recompute(graph).estimate.peak, Effort(), tries=1)
    assert plan is not None
    assert plan.estimate.reruns == 0


def test_what_must_not_run_again_does_not():
    graph = dense(5)
    once = tuple(f"out{k}" for k in range(4))
    bound = replace(graph, never_rerun=once)
    base = no_recompute(bound)
    plan = lower_by_eviction(bound, base, min_peak_bound(bound).bytes, Effort())
    free = lower_by_eviction(graph, no_recompute(graph), min_peak_bound(graph).bytes, Effort())
    runs = runs_of(plan.schedule)
    assert all(runs.count(name) == 1 for name in once)
    assert free.estimate.peak <= plan.estimate.peak < base.estimate.peak


def test_eviction_goes_as_low_as_any_block_plan():
    graph = dense(6)
    plan = lower_by_eviction(graph, no_recompute(graph), min_peak_bound(graph).bytes, Effort())
    assert plan.estimate.peak <= NestedDP().curve(graph, ())[-1].estimate.peak


def test_no_schedule_of_a_small_problem_has_a_smaller_peak_than_the_least():
    graph = dense(2)
    plan = cheapest_near_smallest_peak(graph, moves=60_000)
    assert exhaustive(graph, plan.estimate.peak - 1, 10**6).cost == math.inf


def test_the_least_is_at_most_the_plan_for_min_which_is_within_its_slack(problems):
    for graph in (dense(4), problems.residual((2, 2)), problems.chain(12)):
        least = cheapest_near_smallest_peak(graph, moves=20_000)
        lean = cheapest_near_smallest_peak(graph, moves=20_000, slack=MIN_BUDGET.slack)
        assert least.estimate.peak <= lean.estimate.peak <= lean.budget
        assert least.budget == least.estimate.peak
        assert lean.budget <= 1.02 * least.estimate.peak
        assert min_peak_bound(graph).bytes <= least.estimate.peak


def test_min_and_refusals_state_what_a_little_more_memory_saves(problems):
    for graph in (dense(4), problems.residual((2, 2))):
        lean = cheapest_near_smallest_peak(graph, moves=40_000, slack=MIN_BUDGET.slack)
        again = cheapest_near_smallest_peak(graph, moves=40_000, slack=MIN_BUDGET.slack)
        assert again.near == lean.near
        with pytest.raises(InfeasibleBudget) as refused:
            Auto(moves=40_000).plan(graph, min_peak_bound(graph).bytes - 1)
        assert refused.value.near[0][0] == refused.value.smallest
        for points in (lean.near, refused.value.near):
            peaks, overheads = zip(*points, strict=True)
            assert list(peaks) == sorted(set(peaks))
            assert list(overheads) == sorted(overheads, reverse=True)
            assert peaks[-1] <= 1.2 * peaks[0]
        assert (lean.peak, lean.estimate.overhead) in lean.near


def test_min_knows_the_plans_of_a_falling_budget(monkeypatch):
    fallen = []

    def noted(*args, **options):
        fallen.extend(plans_down_to(*args, **options))
        return fallen

    monkeypatch.setattr(min_budget_plan, "plans_down_to", noted)
    # So that it gets there in few moves.
    monkeypatch.setattr(min_budget_plan, "MIN_BUDGET", replace(MIN_BUDGET, falling=0.6))
    near = cheapest_near_smallest_peak(problems.unet(), moves=200_000, slack=MIN_BUDGET.slack).near
    among = [plan for plan in fallen if plan.peak <= 1.2 * near[0][0]]
    assert among
    assert near[-1][1] <= min(plan.estimate.overhead for plan in among)


def test_the_knee_is_the_point_farthest_below_the_line():
    points = ((100, 1.0), (102, 0.9), (105, 0.2), (120, 0.1))
    assert knee(points) == (105, 0.2)
    assert knee(points[:2]) is None
    assert knee(((100, 1.0), (110, 0.5), (120, 0.0))) is None


def test_the_plan_for_min_is_as_cheap_as_any_within_its_budget():
    graph = dense(2)
    lean = cheapest_near_smallest_peak(graph, moves=20_000, slack=MIN_BUDGET.slack)
    assert lean.estimate.cost == pytest.approx(exhaustive(graph, lean.budget, 10**6).cost)


def test_larger_peaks_of_a_tiny_problem_cost_the_optimum_without_annealing():
    graph = dense(2)
    effort = Effort(moves=1000)
    least = find_smallest_peak(graph, effort)
    made, above = effort.done, rungs_above(graph, [least], effort, least=1.01)
    assert effort.done == made
    assert above
    for plan in above:
        assert plan.estimate.cost == pytest.approx(exhaustive(graph, plan.peak, 10**6).cost)
    assert rungs_above(graph, [no_recompute(graph)], effort) == []  # it costs nothing


@pytest.mark.parametrize(("share", "cheaper"), [(1.02, 0.8), (1.2, 0.2)])
def test_annealing_makes_a_dear_plan_cheap_without_leaving_the_budget(share, cheaper):
    graph = problems.unet()
    dear = plan_near_least(graph, no_recompute(graph).peak, Effort(60, 100_000))
    assert dear is not None
    assert dear.estimate.overhead > DEAR
    found = Search(graph, int(share * dear.peak)).run([runs_of(dear.schedule)], Effort(moves=60_000))
    assert found is not None
    assert found.peak <= share * dear.peak
    assert found.estimate.overhead < cheaper * dear.estimate.overhead


def test_one_annealing_finds_cheap_plans_at_all_peaks():
    graph = problems.unet()
    lowest = min_peak_bound(graph).bytes
    front = plans_down_to(graph, lowest, Effort(moves=60_000))
    assert [p.estimate.cost for p in front] == sorted(p.estimate.cost for p in front)
    assert front[0].peak == no_recompute(graph).peak
    assert len(front) > 10
    again = plans_down_to(graph, lowest, Effort(moves=60_000))
    assert [p.schedule for p in again] == [p.schedule for p in front]
    middle = (front[0].peak + lowest) // 2
    alone = Search(graph, middle).run([], Effort(moves=60_000))
    assert alone is not None
    together = min(p.estimate.overhead for p in front if p.peak <= middle)
    assert together <= alone.estimate.overhead + 0.05


def test_a_falling_budget_needs_no_limit_of_the_effort():
    graph = dense(3)
    assert plans_down_to(graph, min_peak_bound(graph).bytes, Effort())[-1].peak < no_recompute(graph).peak


def test_min_spends_what_is_left_of_its_time_on_the_cheapest_plan():
    asked = []

    def cheapest(seconds):
        asked.append(seconds)
        return Anneal(moves=1000)

    cheapest_near_smallest_peak(dense(4), 3.0, slack=MIN_BUDGET.slack, cheapest=cheapest)
    assert len(asked) == 1
    assert asked[0] > 0


def test_the_least_peak_is_never_above_a_known_plan(problems):
    graph = problems.residual((2, 2))
    known = NestedDP().curve(graph, ())[-1]
    assert find_smallest_peak(graph, Effort(moves=1), [known]).estimate.peak <= known.estimate.peak


def test_from_near_targets_eviction_lowers_the_peak_in_few_runs():
    graph = dense(16)
    base = no_recompute(graph)
    near = lower_by_eviction(
        graph, base, min_peak_bound(graph).bytes, Effort(moves=2000), first=EVICTION.next_pass
    )
    assert near.estimate.peak < 0.75 * base.estimate.peak


@pytest.mark.parametrize("vast", [3000, 10])
def test_block_plans_are_made_even_without_time(problems, monkeypatch, vast):
    graph = problems.residual((3, 4, 6, 3))
    monkeypatch.setattr(block_starts, "VAST", vast)
    lean = leanest_plans(graph, Effort(0.0))
    assert min(plan.peak for plan in lean) < 0.9 * no_recompute(graph).peak


def test_a_refusal_names_what_min_finds():
    graph = dense(6)
    least = cheapest_near_smallest_peak(graph, 1.0).estimate.peak
    auto = Auto(moves=100_000, reuse=False)
    for budget in (min_peak_bound(graph).bytes - 1, least * 9 // 10):
        with pytest.raises(InfeasibleBudget) as caught:
            auto.plan(graph, budget)
        assert caught.value.smallest <= least


def several() -> list[TrainingGraph]:
    return [dense(6), problems.unet(2), problems.towers(6, 3)]


def check_what_is_found_is_enough(graph: TrainingGraph, moves: int) -> None:
    least = find_smallest_peak(graph, Effort(moves=moves)).estimate.peak
    assert find_smallest_peak(graph, Effort(moves=moves), enough=least).estimate.peak == least
    assert find_smallest_peak(graph, Effort(moves=moves), enough=least - 1).estimate.peak == least
    effort = Effort(moves=moves)
    loose = (least + no_recompute(graph).estimate.peak) // 2
    assert find_smallest_peak(graph, effort, enough=loose).estimate.peak <= loose
    assert effort.done < moves


@pytest.mark.parametrize("graph", several(), ids=lambda graph: graph.name)
def test_a_search_for_a_peak_that_a_search_found_finds_it(graph: TrainingGraph) -> None:
    check_what_is_found_is_enough(graph, 20_000)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_a_search_in_random_networks_finds_the_peak_again(seed: int, layers: int) -> None:
    check_what_is_found_is_enough(problems.random_training(random.Random(seed), layers), 3_000)


def smallest_found(auto: Auto, graph: TrainingGraph, budget: int) -> int:
    """The peak of the plan within the budget, or the peak that the refusal names."""
    try:
        return auto.plan(graph, budget).estimate.peak
    except InfeasibleBudget as refused:
        return refused.smallest


@pytest.mark.parametrize("graph", several(), ids=lambda graph: graph.name)
def test_the_bytes_that_min_found_get_a_plan(graph: TrainingGraph) -> None:
    auto = Auto(moves=30_000, reuse=False)
    least = find_smallest_peak_in_stages(graph, Effort(moves=auto.moves).like(SHARES.smallest_peak))
    assert auto.plan(graph, least.peak).peak <= least.peak
    assert smallest_found(auto, graph, least.peak * 99 // 100) <= least.peak
    assert smallest_found(auto, graph, min_peak_bound(graph).bytes - 1) <= least.peak


@pytest.mark.parametrize("graph", several(), ids=lambda graph: graph.name)
def test_a_longer_search_for_the_smallest_peak_finds_no_larger_one(graph: TrainingGraph) -> None:
    peaks = [find_smallest_peak_in_stages(graph, Effort(moves=n)).peak for n in (1, 50_000, 50_000)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] == peaks[2]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_plan_that_was_found_is_not_refused(
    reuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph, store, auto = problems.unet(3), PlanStore(), Auto(moves=30_000, reuse=reuse)
    with pytest.raises(InfeasibleBudget) as refused:
        plan_within(auto, graph, min_peak_bound(graph).bytes - 1, store=store)
    hasty = replace(auto, moves=1)
    for later in (store, PlanStore()) if reuse else (store,):
        assert plan_within(hasty, graph, refused.value.smallest, store=later).peak <= refused.value.smallest


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_with_counted_moves_the_bytes_that_min_found_get_a_plan(seed: int, layers: int) -> None:
    graph = problems.random_training(random.Random(seed), layers)
    search = Anneal(moves=5_000)
    least = least_plan(search, graph, kind="least").estimate.peak
    assert plan_within(search, graph, least).estimate.peak <= least
    with pytest.raises(InfeasibleBudget) as refused:
        plan_within(search, graph, min_peak_bound(graph).bytes - 1)
    assert refused.value.smallest <= least


def test_a_search_that_is_no_longer_needed_ends() -> None:
    graph = dense(16)
    effort = Effort(1000.0, ended=lambda: True)
    plan = find_smallest_peak(graph, effort)
    assert effort.done == 0
    assert plan.estimate.peak < no_recompute(graph).estimate.peak


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Enough])
def test_an_interrupt_before_any_plan_fits_is_raised_again(
    interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = problems.residual((3, 4, 6, 3))
    monkeypatch.setattr(auto_session, "lower_by_eviction", lambda _graph, best, *_, **__: best)

    def progress(_fraction: float, text: str) -> None:
        if text == "nothing fits; lowering the peak":
            raise interrupt

    with pytest.raises(interrupt):
        Auto(moves=300_000, reuse=False).plan(graph, min_peak_bound(graph).bytes, progress)


def test_an_interrupt_between_the_searches_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(min_budget_plan, "plan_by_eviction", Mock(side_effect=KeyboardInterrupt))
    graph = problems.unet(3)
    plan = min_budget_plan.cheapest_near_smallest_peak(graph, 1.0, slack=0.01)
    assert plan.estimate.peak < no_recompute(graph).estimate.peak


def test_searches_of_counted_moves_depend_on_no_plan_on_disk() -> None:
    graph, anneal = problems.random_training(random.Random(0), 6), Anneal(moves=200)

    def outcome() -> tuple[Sequence[str], int]:
        with pytest.raises(InfeasibleBudget) as refused:
            plan_within(anneal, graph, min_peak_bound(graph).bytes - 1)
        return runs_of(least_plan(anneal, graph).schedule), refused.value.smallest

    before = outcome()
    leaner = least_plan(Anneal(moves=20_000), graph, kind="least")
    assert leaner.peak <= before[1]
    PlanStore().save(graph, leaner)
    assert outcome() == before


@pytest.mark.parametrize("name", ["auto", "nested_dp"])
def test_the_least_of_peaks_that_no_float_represents(name: str) -> None:
    blocks = [2**57 + 3 * i + 5 for i in range(8)]
    tensors = [Tensor("x", 8), *(Tensor(f"{kind}{i}", n) for kind in "tg" for i, n in enumerate(blocks))]
    ops = [Op(f"f{i}", (f"t{i - 1}" if i else "x",), (f"t{i}",), 1.0, 0, "forward") for i in range(8)]
    for i in reversed(range(8)):
        ops.append(Op(f"b{i}", (f"t{i}", *[f"g{i + 1}"] * (i < 7)), (f"g{i}",), 1.0, 0, "backward"))
    graph = TrainingGraph("huge", tuple(tensors), ("x",), ("g0",), tuple(ops))
    plan = least_plan(strategy(name), graph, kind="least", time_limit=1.0)
    assert plan.budget == plan.estimate.peak > int(1.0 * plan.estimate.peak)  # the float is smaller
