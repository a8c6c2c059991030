"""Nested plans equal Revolve's on equal layers, and have smaller peaks than block partitions on any network."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import count
from math import comb
from random import Random

import pytest

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.auto import smallest_peak_search
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.blocks.block_chain import block_chain, narrow_places
from rematplan.planner.blocks.interval_dp import intervals
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Enough
from rematplan.planner.registry import strategy
from rematplan.planner.strategies.nested_dp import NestedDP
from rematplan.planner.strategies.store_all import no_recompute

SIZE = 1000


def equal_layers(n: int) -> TrainingGraph:
    """Layers of one size and cost, whose backward reads their input."""
    value = ["x", *(f"a{k}" for k in range(1, n + 1))]
    forward = [Op(f"f{k}", (value[k - 1],), (value[k],), 1.0, 0, "forward") for k in range(1, n + 1)]
    loss = Op("loss", (value[n],), (f"g{n}",), 1.0, 0, "backward")
    backward = [
        Op(f"b{k}", (value[k - 1], f"g{k}"), (f"g{k - 1}",), 2.0, 0, "backward") for k in range(n, 0, -1)
    ]
    tensors = (*value, *(f"g{k}" for k in range(n + 1)))
    ops = (*forward, loss, *backward)
    return TrainingGraph(f"{n} layers", tuple(Tensor(t, SIZE) for t in tensors), ("x",), ("g0",), ops)


def revolve(layers: int, checkpoints: int) -> int:
    """Layers that run again at least (Griewank and Walther 2000, proposition 1), the input stored besides."""
    sweeps = next(r for r in count() if comb(checkpoints + r, checkpoints) >= layers)
    return sweeps * layers - comb(checkpoints + sweeps, sweeps - 1) - (layers - 1)


@pytest.mark.parametrize("layers", [7, 30, 100])
def test_equal_layers_need_as_many_reruns_as_revolve_proves(layers):
    graph = equal_layers(layers)
    plans = [p for p in NestedDP().curve(graph, ()) if p.estimate.reruns]
    assert len(plans) >= min(layers - 4, 20)
    for plan in plans:
        held = plan.estimate.peak // SIZE - 3  # beside the input and a layer's two gradients
        assert plan.estimate.reruns == revolve(layers, held)
    assert plans[-1].estimate.peak <= (4 if layers < 50 else 5) * SIZE


def test_plans_of_few_layers_are_optimal():
    graph = equal_layers(4)
    for slots in (4, 5, 6):
        exact = exhaustive(graph, slots * SIZE)
        assert exact is not None
        assert NestedDP().plan(graph, slots * SIZE).estimate.cost == exact.cost


def test_equal_layers_are_solved_once():
    chain = block_chain(equal_layers(400), 1000)
    everywhere = list(range(1, 401))
    assert len(intervals(chain, everywhere).first) < 5 * 400
    costs = chain.cost.copy()
    costs += range(400)
    assert len(intervals(replace(chain, cost=costs), everywhere).first) == 400 * 401 // 2


def test_a_thousand_layers_fit_in_the_memory_of_a_few(checker):
    assert NestedDP(plans=4).curve(equal_layers(1000), ())[-1].estimate.peak <= 9 * SIZE


def test_the_search_for_the_smallest_peak_starts_from_nested_plans():
    assert cheapest_near_smallest_peak(equal_layers(150), moves=10).estimate.peak <= 7 * SIZE


def test_the_search_for_the_smallest_peak_starts_from_the_leanest_table(problems):
    """Here a table of coarser units has it."""
    tape, rng = problems.Tape(), Random(3)
    y = tape.x
    for _ in range(110):
        y = tape.conv(y, rng.choice([10240, 10240, 20480]))
    graph = tape.finish(y)
    least = NestedDP().curve(graph, ())[-1].estimate.peak
    assert min(p.estimate.peak for p in leanest_plans(graph, Effort())) <= least


@pytest.mark.parametrize("shape", ["unet", "residual"])
def test_the_smallest_peak_is_below_that_of_any_block_partition(problems, shape):
    graph = problems.unet() if shape == "unet" else problems.residual((2, 2, 2))
    least = {name: strategy(name).curve(graph, ())[-1].estimate.peak for name in ("nested_dp", "approx_dp")}
    assert least["nested_dp"] < least["approx_dp"]


def test_large_problems_have_blocks_of_several_nodes(problems):
    graph = problems.residual()
    chain = block_chain(graph, 12)
    assert 6 <= len(chain) <= 12
    forward = [graph.ops[o] for ops in chain.forward for o in ops]
    assert {op.name for op in forward} == {op.name for op in graph.ops if op.phase == "forward"}
    assert len({o for ops in chain.backward for o in ops}) == len(graph.ops) - len(forward)


def test_ops_that_may_run_only_once_run_once(problems):
    graph = problems.residual((2, 2))
    once = tuple(op.name for op in graph.ops if op.phase == "forward")[::3]
    for plan in NestedDP().curve(replace(graph, never_rerun=once), ()):
        runs = runs_of(plan.schedule)
        assert all(runs.count(name) == 1 for name in once)


def test_weight_gradients_do_not_delay_the_chain():
    """Where all weights' gradients are computed at the end, each still runs when what it reads is there."""
    n = 40
    graph = equal_layers(n)
    late = [
        Op(f"w{k}", (f"g{k}", "x" if k == 1 else f"a{k - 1}"), (f"dw{k}",), 1.0, 0, "backward")
        for k in range(n, 0, -1)
    ]
    weights = [Tensor(f"dw{k}", 1) for k in range(1, n + 1)]
    graph = replace(
        graph,
        tensors=(*graph.tensors, *weights),
        ops=(*graph.ops, *late),
        outputs=(*graph.outputs, *(t.name for t in weights)),
    )
    assert NestedDP().curve(graph, ())[-1].estimate.peak <= 9 * SIZE


def test_a_term_of_a_sum_is_in_the_block_of_the_sum():
    """A sum of a long path and a short one: no backward op reads its terms."""
    tensors = tuple(Tensor(t, SIZE) for t in ("x", "a", "scaled", "sum", "g", "ga", "gx"))
    ops = (
        Op("conv", ("x",), ("a",), 9.0, 0, "forward"),
        Op("scale", ("a",), ("scaled",), 1.0, 0, "forward"),
        Op("add", ("scaled", "x"), ("sum",), 1.0, 0, "forward"),
        Op("loss", ("sum",), ("g",), 1.0, 0, "backward"),
        Op("dscale", ("g", "a"), ("ga",), 1.0, 0, "backward"),
        Op("dconv", ("ga", "g", "x"), ("gx",), 9.0, 0, "backward"),
    )
    first = Op("first", ("input",), ("x",), 1.0, 0, "forward")
    graph = TrainingGraph("sum", (Tensor("input", 1), *tensors), ("input",), ("gx",), (first, *ops))
    chain = block_chain(graph, 100)
    assert [tuple(graph.ops[o].name for o in block) for block in chain.forward] == [
        ("first",),
        ("conv",),
        ("scale", "add"),
    ]
    assert chain.saved.tolist() == [SIZE, SIZE, SIZE]


def test_a_gradient_is_computed_in_the_stage_that_reads_it():
    """An auxiliary loss at the third layer: its gradient is spread over the layer when that layer's turn comes."""
    graph = equal_layers(8)
    spread = Op("spread", ("aux",), ("g3 too",), 1.0, 0, "backward")
    at = next(k for k, op in enumerate(graph.ops) if op.name == "b3")
    dearer = replace(graph.ops[at], reads=(*graph.ops[at].reads, "g3 too"))
    late = replace(
        graph,
        tensors=(*graph.tensors, Tensor("aux", 1), Tensor("g3 too", SIZE)),
        inputs=(*graph.inputs, "aux"),
        ops=(*graph.ops[:8], spread, *graph.ops[8:at], dearer, *graph.ops[at + 1 :]),
    )
    chain = block_chain(late, 100)
    stage = next(k for k, ops in enumerate(chain.backward) if 8 in ops)
    assert stage == next(k for k, ops in enumerate(chain.backward) if at + 1 in ops)


def test_places_of_many_nodes_are_found_in_little_memory():
    chain = block_chain(equal_layers(2000), 2000)
    tracemalloc.start()
    try:
        narrow_places(chain, 30)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_an_interrupt_before_the_first_plan_is_raised(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    known = NestedDP().curve(equal_layers(20), ())[-1].estimate.peak
    monkeypatch.setattr(Search, "prepare", interrupted)
    assert cheapest_near_smallest_peak(equal_layers(20), moves=10).estimate.peak <= known
    monkeypatch.setattr(smallest_peak_search, "leanest_plans", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cheapest_near_smallest_peak(equal_layers(20), moves=10)


def test_a_search_that_is_stopped_after_its_table_has_a_plan():
    graph, tables = equal_layers(60), []

    def stop_after_the_table(_fraction, table):
        if table in tables:
            raise Enough
        tables.append(table)

    least = NestedDP(near=1).around(graph, 0, stop_after_the_table)[-1].peak
    assert least < 0.5 * no_recompute(graph).peak


@pytest.mark.parametrize("unit", [1e-60, 1e60])
def test_plans_do_not_depend_on_the_unit_of_costs(unit):
    graph = equal_layers(20)
    rescaled = replace(graph, ops=tuple(replace(op, cost=unit * op.cost) for op in graph.ops))
    plans = [NestedDP().curve(g, ()) for g in (graph, rescaled)]
    assert len(plans[0]) > 5
    assert [p.schedule for p in plans[0]] == [p.schedule for p in plans[1]]
