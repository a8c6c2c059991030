"""The search back in time: its values, bounds and plans against all schedules of small problems."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import problems
import pytest

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.least import near_least
from rematplan.planner.least.demands import demands_of
from rematplan.planner.least.group_descent import descend_by_groups
from rematplan.planner.least.inverses_as_parts import inverses_as_parts
from rematplan.planner.least.last_heavy_run import LastHeavyRun
from rematplan.planner.least.near_least import plan_near_least
from rematplan.planner.least.regression import search
from rematplan.planner.least.reuse import shortened
from rematplan.planner.least.unfold import TooLong
from rematplan.planner.least.values import Values
from rematplan.planner.strategies.store_all import no_recompute

UNLIMITED = 10**9


def with_inverses(graph: TrainingGraph, rng: random.Random) -> TrainingGraph:
    """The problem with inverses that recover what ops read from what they write, as far as it has room for that."""
    inverses: list[Op] = []
    for op in graph.ops:
        room = graph.size[op.writes[0]]
        for t in op.reads:
            if graph.size[t] <= room and rng.random() < 0.7:
                room -= graph.size[t]
                inverses.append(Op(f"invert_{op.name}_{t}", (op.writes[0],), (t,), 1.0))
    return replace(graph, inverses=tuple(inverses))


def random_problem(rng: random.Random, count: int) -> TrainingGraph:
    tensors: list[Tensor] = []
    ops: list[Op] = []
    for i in range(count):
        made = [t.name for t in tensors]
        reads = rng.sample(made, min(len(made), rng.choice((1, 1, 2, 3)))) if made else []
        if made and rng.random() < 0.6:
            reads = list(dict.fromkeys((made[-1], *reads)))
        writes = [f"t{i}_{j}" for j in range(1 if rng.random() < 0.75 else 2)]
        tensors += [Tensor(name, rng.choice((1, 2, 3, 4, 6, 9))) for name in writes]
        ops.append(Op(f"o{i}", tuple(reads), tuple(writes), 1.0, workspace=rng.choice((0, 0, 1, 3))))
    read = {t for op in ops for t in op.reads}
    outputs = tuple(t.name for t in tensors if t.name not in read or rng.random() < 0.1)
    return TrainingGraph("random", tuple(tensors), (), outputs, tuple(ops))


Recipe = tuple[Iterable[Any], Iterable[Any], int]
"""What an op reads and writes, and its workspace."""


def least_peak(goal: Iterable[Any], recipes: Sequence[Recipe], sizes: Any, once: Sequence[int] = ()) -> int:
    """The least peak of all sequences of runs and frees after which ``goal`` is resident. ``once``: the recipes, by
    position, that run at most once."""
    wanted, best = frozenset(goal), {frozenset[Any](): 0}
    ran = {i: f"ran {i}" for i in once}
    queue: list[tuple[int, tuple[Any, ...]]] = [(0, ())]
    while queue:
        peak, state = heapq.heappop(queue)
        resident = frozenset(state)
        if peak > best[resident]:
            continue
        if wanted <= resident:
            return peak
        reached = [(peak, resident - {t}) for t in resident if t not in ran.values()]
        for i, (reads, writes, workspace) in enumerate(recipes):
            if resident.issuperset(reads) and ran.get(i) not in resident:
                after = resident.union(writes, [ran[i]] if i in ran else [])
                held = sum(sizes[t] for t in after.difference(ran.values()))
                reached.append((max(peak, held + workspace), after))
        for level, after in reached:
            if level < best.get(after, UNLIMITED):
                best[after] = level
                heapq.heappush(queue, (level, tuple(sorted(after))))
    raise AssertionError("every set can be computed")


@pytest.mark.parametrize("seed", range(40))
def test_values_and_bounds_enclose_the_least_peak_of_all_schedules(seed: int) -> None:
    graph = random_problem(random.Random(seed), 6)
    demands = demands_of(graph, 0.0)
    if len(demands.sizes) > 11:
        return
    effort = Effort(moves=UNLIMITED)
    values = Values(demands, effort)
    values.run(3000, 300)
    heavy = LastHeavyRun(demands)
    workspaces = (op.workspace for op in demands.ops)
    recipes = list(zip(demands.reads, demands.writes, workspaces, strict=True))
    for v, reads in enumerate(demands.reads):
        least = least_peak(reads, recipes, demands.sizes)
        assert values.value[v] == max(least, demands.work[v])
        assert values.floor[v] <= values.value[v]
        assert heavy.bound(reads, 0, 1000) <= least if reads else True
    least = least_peak(demands.outputs, recipes, demands.sizes)
    outputs = np.array(demands.outputs, np.int64)
    level, bound, *_ = search(demands.tables, outputs, values.free, 0, -1, 3000, False, -1)
    assert bound == level == least
    assert heavy.bound(demands.outputs, 0, 1000) <= least
    assert descend_by_groups(demands.tables, demands.outputs, 0, 300, effort).level >= least


def with_a_loss(graph: TrainingGraph, rng: random.Random) -> TrainingGraph:
    """The problem with an op that runs only once, reads a tensor, and writes a tensor of no bytes, which some later ops
    read, and an output."""
    at = rng.randrange(1, len(graph.ops))
    loss = Op("loss", graph.ops[at - 1].writes[:1], ("run", "value"), 1.0, phase=graph.ops[0].phase)
    later = [replace(op, reads=("run", *op.reads)) if rng.random() < 0.6 else op for op in graph.ops[at:]]
    return replace(
        graph,
        tensors=(*graph.tensors, Tensor("run", 0), Tensor("value", rng.choice((0, 1, 3)))),
        outputs=(*graph.outputs, "value"),
        ops=(*graph.ops[:at], loss, *later),
        never_rerun=("loss",),
    )


def test_least_peaks_of_small_problems_are_proven_though_an_op_runs_only_once() -> None:
    searched = 0
    for seed in range(120):
        graph = with_a_loss(random_problem(rng := random.Random(seed), 5), rng)
        if len(graph.tensors) > 9:
            continue
        recipes = [(op.reads, op.writes, op.workspace) for op in graph.ops]
        once = [i for i, op in enumerate(graph.ops) if op.name == "loss"]
        least = least_peak(graph.outputs, recipes, graph.size, once)
        plan = plan_near_least(graph, UNLIMITED, Effort(moves=UNLIMITED))
        assert plan is not None
        assert plan.peak == min_peak_bound(graph).bytes == least
        searched += 1
    assert searched > 60


def least_with_inverses(graph: TrainingGraph) -> int:
    """The least peak of all sequences of runs, inverses' included, and frees."""
    return least_peak(
        graph.outputs, [(op.reads, op.writes, op.workspace) for op in graph.recipes], graph.size
    )


def test_what_is_proven_with_inverses_is_not_above_the_least_peak_of_all_schedules() -> None:
    raised = 0
    for seed in range(150):
        graph = with_inverses(random_problem(rng := random.Random(seed), 6), rng)
        if len(graph.tensors) > 9 or not graph.inverses:
            continue
        relaxed, own = inverses_as_parts(graph), min_peak_bound(graph).bytes
        assert relaxed is not None
        least = least_with_inverses(graph)
        assert least_with_inverses(relaxed) <= least
        plan_near_least(graph, UNLIMITED, Effort(moves=UNLIMITED))
        assert min_peak_bound(graph).bytes <= least
        raised += min_peak_bound(graph).bytes > own
    assert raised


def test_without_what_it_computes_a_whole_has_no_part() -> None:
    tensors = (Tensor("a", 1), Tensor("b", 9), Tensor("c", 9))
    ops = (Op("a", (), ("a",), 1.0), Op("b", ("a",), ("b",), 1.0), Op("c", ("b",), ("c",), 1.0))
    graph = TrainingGraph("chain", tensors, (), ("c",), ops, (Op("invert", ("c",), ("a",), 1.0),))
    assert inverses_as_parts(graph) is None


@pytest.mark.parametrize("seed", range(8))
def test_a_shortened_sequence_has_the_same_outputs_within_its_budget(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_problem(rng, 12)
    demands = demands_of(graph, 0.0)
    runs: list[int] = []
    for v in range(len(demands.ops)):  # everything again before each op
        runs += [*range(v), v]
    peak = plan_from_runs(graph, [demands.ops[v].name for v in runs], "long").peak
    short = shortened(demands, runs, peak)
    plan = plan_from_runs(graph, [demands.ops[v].name for v in short], "short")
    assert plan.peak <= peak
    assert len(short) < len(runs)


@pytest.mark.parametrize(
    "graph",
    [problems.unet(3), problems.residual((2, 2)), problems.chain(12), problems.towers(6, 3)],
    ids=lambda graph: graph.name,
)
def test_plans_near_the_least_are_near_what_is_proven(graph: TrainingGraph) -> None:
    plan = plan_near_least(graph, no_recompute(graph).peak, Effort(moves=3_000_000))
    assert plan is not None
    assert min_peak_bound(graph).bytes <= plan.peak <= 1.2 * min_peak_bound(graph).bytes


def test_ops_that_may_run_only_once_do() -> None:
    graph = problems.unet(3)
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    graph = TrainingGraph(
        graph.name, graph.tensors, graph.inputs, graph.outputs, graph.ops, never_rerun=(forward[3],)
    )
    plan = plan_near_least(graph, no_recompute(graph).peak, Effort(moves=3_000_000))
    if plan is not None:
        assert runs_of(plan.schedule).count(forward[3]) == 1


def test_a_sequence_of_runs_is_no_longer_than_the_effort_allows() -> None:
    graph = problems.unet(3)
    with mock.patch.object(near_least, "Unfolding", side_effect=TooLong) as unfolding:
        assert plan_near_least(graph, no_recompute(graph).peak, Effort(moves=1_000_000)) is None
    assert 0 < unfolding.call_args.args[2] <= 1_000_000 // near_least.NEAR_LEAST.run_moves
