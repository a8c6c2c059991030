"""Stated phases that contradict the graph are noticed, and the plans are no worse than with the right ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import ModuleType

import pytest
import test_reversible

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.arrays.phases import contradiction, infer_phases, phase_views
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.peak_report import peak_split
from rematplan.planner.registry import strategy
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute

OTHER = {"forward": "backward", "backward": "forward"}
BLOCKS = ("chen_sqrt", "chen_greedy", "nested_dp", "exact_dp")
Spoil = Callable[[TrainingGraph], TrainingGraph]


def flipped(share: float, seed: int = 1) -> Spoil:
    """Return what gives a share of the ops, chosen at random, the other phase."""

    def spoil(graph: TrainingGraph) -> TrainingGraph:
        source = Random(seed)
        ops = (replace(op, phase=OTHER[op.phase]) if source.random() < share else op for op in graph.ops)
        return replace(graph, ops=tuple(ops))

    return spoil


def moved(share: float) -> Spoil:
    """Return what ends the forward half after this share of all ops."""

    def spoil(graph: TrainingGraph) -> TrainingGraph:
        last = share * len(graph.ops)
        ops = (replace(op, phase="forward" if k < last else "backward") for k, op in enumerate(graph.ops))
        return replace(graph, ops=tuple(ops))

    return spoil


WRONG = {
    "few": flipped(0.1),
    "half": flipped(0.5),
    "all": flipped(1.0),
    "early": moved(0.03),
    "late": moved(0.8),
}
wrongly = pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)


def test_right_phases_are_left_alone(problems: ModuleType) -> None:
    graphs = [problems.residual((3, 4, 6, 3)), problems.unet(4), problems.chain(20), problems.wide(4)]
    graphs += [problems.random_training(Random(seed), 40) for seed in range(20)]
    for graph in graphs:
        assert phase_views(graph) == (graph,)
        assert contradiction(graph) == ""


@wrongly
def test_wrong_phases_are_noticed_and_inferred(problems: ModuleType, spoil: Spoil) -> None:
    for graph in (problems.residual((3, 4, 6, 3)), problems.unet(4), problems.chain(20)):
        wrong = spoil(graph)
        inferred, stated = phase_views(wrong)
        assert stated is wrong
        assert infer_phases(wrong) is inferred
        assert infer_phases(inferred) is inferred
        off = sum(a.phase != b.phase for a, b in zip(inferred.ops, graph.ops, strict=True))
        assert off <= 0.03 * len(graph.ops)
        assert f"of {len(graph.ops)} ops contradict" in contradiction(wrong)
        assert "\n" not in contradiction(wrong)
        base = no_recompute(graph).schedule
        assert peak_split(wrong, base) == peak_split(inferred, base)


def joined(layers: int) -> TrainingGraph:
    """Return a step whose last forward op reads the outputs of all layers, which nothing reads afterwards.

    The backward half reads other tensors of each layer.
    """
    size = 1024
    forward = [Op("in", ("x",), ("h0",), 1.0, phase="forward")]
    backward = []
    for k in range(1, layers):
        saved = tuple(f"saved{k}.{part}" for part in range(12))
        forward.append(Op(f"f{k}", (f"h{k - 1}",), (f"h{k}", *saved), 1.0, phase="forward"))
        backward.append(Op(f"d{k}", (f"g{k + 1}", *saved), (f"g{k}",), 2.0, phase="backward"))
    forward.append(Op("join", tuple(f"h{k}" for k in range(layers)), ("y",), 1.0, phase="forward"))
    backward.append(Op("dy", ("y",), (f"g{layers}",), 1.0, phase="backward"))
    ops = (*forward, *reversed(backward))
    made = tuple(Tensor(t, size) for op in ops for t in op.writes)
    return TrainingGraph("joined", (Tensor("x", size), *made), ("x",), ("g1",), ops)


def test_a_last_forward_op_that_reads_many_tensors_is_forward() -> None:
    graph = joined(12)
    assert phase_views(graph) == (graph,)
    for spoil in WRONG.values():
        inferred = phase_views(spoil(graph))[0]
        assert sum(a.phase != b.phase for a, b in zip(inferred.ops, graph.ops, strict=True)) <= 1


@wrongly
@pytest.mark.parametrize("name", BLOCKS)
def test_block_plans_are_as_good_as_those_of_both_phases(
    problems: ModuleType, spoil: Spoil, name: str
) -> None:
    wrong = spoil(problems.residual((2, 2)))
    found = strategy(name).curve(wrong, ())
    for plan in strategy(name).curve(infer_phases(wrong), ()):
        assert any(p.peak <= plan.peak and p.estimate.cost <= plan.estimate.cost for p in found)


def test_block_plans_of_the_stated_phases_are_kept(problems: ModuleType) -> None:
    """A stem that is left out of the forward half is not recomputed: no division is better at every budget."""
    wrong = moved(0.3)(problems.residual((2, 2)))
    inferred = strategy("chen_sqrt").curve(infer_phases(wrong), ())
    both = strategy("chen_sqrt").curve(wrong, ())
    assert {p.schedule for p in both} - {p.schedule for p in inferred}


@wrongly
def test_the_smallest_peak_is_that_of_the_right_phases(problems: ModuleType, spoil: Spoil) -> None:
    graph = problems.residual((2, 2))
    right, wrong = (cheapest_near_smallest_peak(g, moves=20_000) for g in (graph, spoil(graph)))
    assert wrong.peak <= 1.005 * right.peak


def test_a_plan_within_a_budget_is_proven_optimal(problems: ModuleType) -> None:
    graph = flipped(0.5)(problems.residual((3, 4, 6, 3)))
    plan = Auto(moves=300_000, reuse=False, gap=0.0).plan(graph, int(0.8 * no_recompute(graph).peak))
    assert plan.status == "optimal"


@wrongly
def test_tensors_are_recovered_as_with_the_right_phases(spoil: Spoil) -> None:
    graph = test_reversible.couplings(12)
    right, wrong = (Reversible().curve(g, ())[-1] for g in (graph, spoil(graph)))
    assert wrong.peak <= right.peak
