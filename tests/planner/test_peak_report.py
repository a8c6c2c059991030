"""The report on the smallest peak: its figures add up, and the stated lower bound is at most any peak."""

import pytest

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.peak_report import floor_text, peak_cause, transients
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.store_all import StoreAll
from rematplan.plans.budget_searches import plan_within


def two_ops(output: int = 8) -> TrainingGraph:
    return TrainingGraph(
        name="two",
        tensors=(Tensor("w", 3), Tensor("h", 10), Tensor("y", output)),
        inputs=("w",),
        outputs=("y",),
        ops=(Op("f", ("w",), ("h",), 1.0, 100), Op("g", ("h", "w"), ("y",), 1.0, 5)),
    )


def test_transients_are_reads_writes_and_workspace():
    found = transients(two_ops(), "g")
    assert (found.reads, found.writes, found.workspace, found.total) == (10, 8, 5, 23)
    assert str(found) == "op 'g' (reads 10 B + writes 8 B + workspace 5 B = 23 bytes)"


def test_the_parts_of_a_peak_sum_to_it(problems):
    for graph in (problems.chain(12), problems.unet(3), problems.wide(4)):
        for plan in (
            plan_from_runs(graph, [op.name for op in graph.ops], "base"),
            cheapest_near_smallest_peak(graph, moves=20_000),
        ):
            cause = peak_cause(graph, plan)
            assert cause.inputs + (cause.at.total if cause.at else 0) + cause.others == plan.estimate.peak
            assert cause.others >= 0
            assert cause.floor.bytes <= plan.estimate.peak
            assert cause.document()["floor"] == cause.floor.bytes


def test_a_refusal_states_the_lower_bound_of_the_peak():
    with pytest.raises(InfeasibleBudget) as caught:
        plan_within(StoreAll(), two_ops(), 50)
    assert caught.value.floor == floor_text(two_ops())
    assert "the proven least is 113 B (113 bytes): op 'f' (reads 0 B + writes 10 B" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert floor_text(two_ops(output=500)).startswith("518 B (518 bytes): op 'g'")


@pytest.mark.parametrize(
    ("strategy", "above_floor", "known", "text"),
    [
        (ChenSqrt(), 0, "least", "is below the smallest found, .*; this strategy has no smaller plan"),
        (
            Anneal(time_limit=0.2),
            0,
            "searched",
            "is below the smallest found, .*; with a larger time limit a smaller one may be found",
        ),
        (
            Auto(moves=30_000, reuse=False),
            -1,
            "proven",
            "is proven to be too small for any plan; the smallest found is .*; the proven least is ",
        ),
    ],
)
def test_a_refusal_states_how_certain_the_smallest_peak_is(problems, strategy, above_floor, known, text):
    graph = problems.chain(12)
    budget = min_peak_bound(graph).bytes + above_floor
    with pytest.raises(InfeasibleBudget, match=text) as caught:
        plan_within(strategy, graph, budget)
    assert caught.value.known == known
    assert caught.value.smallest > budget


def test_the_outputs_at_the_end_can_bound_the_peak():
    graph = TrainingGraph(
        name="ends",
        tensors=tuple(Tensor(t, 10) for t in "abc"),
        inputs=(),
        outputs=("a", "b", "c"),
        ops=tuple(Op(f"make {t}", (), (t,), 1.0) for t in "abc"),
    )
    assert floor_text(graph) == "30 B (30 bytes): what the end holds"
