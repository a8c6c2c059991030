"""Plans for several micro-batches in flight are within the budget by an independent count, optimal on tiny stages,
and refused one byte below the smallest budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import starmap

import pytest
from brute_force import cheapest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import replayed
from stage_chains import WEIGHTS, WithoutStarts, chain_stage, in_turn, overwritable, overwriting

from rematplan.ir import CHEAP, InfeasibleBudget, Op, Tensor, TrainingGraph
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.core.effort import MOVES_PER_SECOND, Effort
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import Run
from rematplan.planner.pipeline.actions import Action, RankActions
from rematplan.planner.pipeline.gpipe_and_1f1b import one_forward_one_backward
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.rank_search import LIMITS, RankPlan, RankSearch
from rematplan.planner.pipeline.stage_plan import MessageBytes, StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.store_all import no_recompute


class Exact(WithoutStarts):
    """Plans tiny problems by looking at all schedules."""

    def within(
        self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort
    ) -> Plan | None:
        del starts, effort
        found = exhaustive(replace(graph, never_rerun=()), budget, 20_000)
        assert found is not None
        if found.cost == math.inf:
            return None
        return plan_from_runs(graph, found.runs, "exact")

    def least(self, graph: TrainingGraph, starts: Sequence[Plan], effort: Effort) -> Plan:
        low, high = graph.input_bytes - 1, no_recompute(graph).estimate.peak
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.within(graph, middle, starts, effort) is None else (low, middle)
            )
        plan = self.within(graph, high, starts, effort)
        assert plan is not None
        return plan

    def floor(self, graph: TrainingGraph, budget: int, _effort: Effort) -> float:
        found = exhaustive(replace(graph, never_rerun=()), budget, 20_000)
        return 0.0 if found is None else found.cost / graph.base_cost - 1


def free(stage: StageProblem) -> StageProblem:
    """The stage, any op of which may run again, as the exhaustive searches know it."""
    return replace(stage, graph=replace(stage.graph, never_rerun=()))


def searched(stages: Sequence[StageProblem], k: int, budget: int) -> RankPlan:
    return RankSearch(stages, in_turn(k, 2 * k), budget, Exact()).run()


def all_kept(stage: StageProblem) -> StagePlan:
    return stage.measured(no_recompute(stage.graph))


def optimum(stage: StageProblem, k: int, budget: int) -> float:
    """The least extra time of any plan with k in flight: for every κ the cheapest schedule within the rest."""
    keeps = {0}
    for t in stage.graph.tensors:
        keeps |= {kept + t.bytes for kept in keeps}
    base, own = stage.graph.base_cost, stage.bytes((*stage.per_microbatch, *stage.tangents))
    unreserved = budget - stage.gradient_bytes - stage.bytes(stage.states)
    costs = []
    for kept in sorted({*keeps} & set(range(all_kept(stage).held.kept + 1))):
        room = (
            unreserved - own - (k - 1) * (kept + stage.bytes(stage.per_microbatch)) + stage.graph.input_bytes
        )
        if room > 0:
            graph = stage.bounded(room, kept + stage.bytes(stage.per_microbatch))
            costs.append(cheapest(graph, room, overwritable(stage) if stage.reused else {}))
    return min(costs, default=math.inf) - base


def test_a_tangent_that_only_the_backward_has_is_charged_to_its_last_read() -> None:
    """The peak of the backward is in the first layer, and only the last layer reads the tangent, of 8 bytes."""
    held = free(chain_stage([40, 2, 8], [1.0, 1.0, 1.0]))
    freed = replace(held, tangents_held=lambda _: 0)
    figures, wanted = all_kept(freed), all_kept(held)
    assert wanted.transients.backward - figures.transients.backward == 8
    lower = replace(
        wanted.transients,
        backward=figures.transients.backward,
        first_backward=figures.transients.first_backward,
    )
    assert replace(wanted, transients=lower) == figures
    late = replace(held, tangents_held=len)  # autograd holds the tangent until the backward has ended
    assert all_kept(late) == wanted
    returned = replace(freed, graph=replace(freed.graph, outputs=(*freed.graph.outputs, "g")))
    assert all_kept(returned) == wanted
    budget = rank_peak(in_turn(2, 4), [figures])
    found = searched([freed], 2, budget)
    assert (found.extra, found.floor, found.peak) == (0, 0, budget)
    assert searched([held], 2, budget).extra > 0


def test_an_output_that_torch_frees_is_charged_in_the_backward_only_where_it_is_read() -> None:
    """The output, ``x3``, has 8 bytes."""
    stage = chain_stage([40, 2, 8], [1.0, 1.0, 1.0])
    kept, freed = all_kept(stage), all_kept(replace(stage, freed={"x3": frozenset()}))
    assert (kept.held.loose, freed.held.loose) == (0, 8)
    assert kept.held.kept - freed.held.kept == 8
    for name in ("backward", "first_backward"):
        assert getattr(kept.transients, name) - getattr(freed.transients, name) == 8
    assert kept.transients.forward == freed.transients.forward
    assert all_kept(replace(stage, freed={"x3": frozenset({"b3"})})) == replace(kept)  # the backward reads it
    again = replace(stage, freed={"x3": frozenset({"f2"})})  # an op of the forward reads it
    runs = [op.name for op in stage.graph.ops]
    twice = plan_from_runs(stage.graph, [*runs[:-6], "f2", *runs[-6:]], "twice")
    assert all_kept(again).held.loose == 8
    assert again.measured(twice).held.loose == 0


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=2), st.integers(2, 3))
def test_floors_of_a_stage_whose_outputs_are_freed_hold_for_all_known_plans(
    rows: list[tuple[int, int]], ranks: int
) -> None:
    stage = free(chain_stage([size for size, _ in rows], [float(cost) for _, cost in rows]))
    stage = replace(
        stage,
        freed={"x2": frozenset()},
        template=StagePlan(0, messages=MessageBytes(sent=stage.graph.size["x2"])),
    )
    actions = one_forward_one_backward(ranks, 2 * ranks, True).actions[0]
    whole = rank_peak(actions, [all_kept(stage)])
    found: dict[int, RankPlan] = {}
    for budget in range(whole, 0, -max(1, whole // 12)):
        try:
            found[budget] = RankSearch([stage], actions, budget, Exact()).run()
        except InfeasibleBudget:
            break
    for budget, one in found.items():
        assert one.peak == max(replayed(actions, {0: one.stages[0]})) <= budget
        fitting = [other.extra for other in found.values() if other.peak <= budget]
        assert one.floor <= min(fitting) + 1e-6


def test_a_tangent_that_weight_gradients_read_is_charged_until_then() -> None:
    split = chain_stage([40, 2, 8], [1.0, 1.0, 1.0], split=True)
    held, freed = all_kept(split), all_kept(replace(split, tangents_held=lambda _: 0))
    assert held.transients.backward == freed.transients.backward
    assert held.held.deferred == freed.held.deferred
    assert held.transients.weight - freed.transients.weight in (0, 8)


def test_a_weight_gradient_frees_a_tangent_after_its_last_read_if_only_the_backward_has_it() -> None:
    """The tangent has 8 bytes. The peak of the first W, which creates gradients, is after the tangent's last read. A B,
    whose caller has the tangent, needs as many bytes in both cases."""
    split = chain_stage([40, 2, 8], [1.0, 1.0, 1.0], weight=20, split=True)
    whole, other = all_kept(split), all_kept(replace(split, released=True))
    held, freed = whole.transients, other.transients
    assert held.first_weight is not None
    assert freed.first_weight is not None
    assert held.first_weight - freed.first_weight == 8
    assert held.first_weight + held.whole == freed.first_weight + freed.whole
    assert replace(held, first_weight=0, whole=0) == replace(freed, first_weight=0, whole=0)
    assert replace(whole, transients=freed) == other


SMALL = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=2)


@settings(max_examples=30, deadline=None)
@given(SMALL, st.integers(1, 4), st.floats(0, 1))
def test_no_plan_of_a_tiny_stage_is_cheaper_and_the_floor_holds(
    rows: list[tuple[int, int]], k: int, share: float
) -> None:
    stage = free(chain_stage([size for size, _ in rows], [float(cost) for _, cost in rows]))
    actions = in_turn(k, 2 * k)
    whole = rank_peak(actions, [all_kept(stage)])
    budget = int(share * whole)
    best = optimum(stage, k, budget)
    if best == math.inf:
        with pytest.raises(InfeasibleBudget) as refused:
            searched([stage], k, budget)
        assert refused.value.smallest > budget
        return
    found = searched([stage], k, budget)
    (figures,) = found.stages
    assert found.peak == max(replayed(actions, {0: figures})) <= budget
    assert found.floor <= best + 1e-6
    assert found.extra == pytest.approx(figures.times.extra)
    assert found.extra == pytest.approx(best)


@pytest.mark.parametrize(("size", "inner", "budget"), [(1, 1, 13), (2, 1, 22)])
def test_the_floor_holds_for_ops_that_write_into_their_operands(size: int, inner: int, budget: int) -> None:
    """The search need not find the optimum: whether a schedule frees an operand is known only when it is found."""
    twice = free(chain_stage([size] * 2, [1.0, 1.0], 1, inner))
    once = overwriting(twice)
    assert (optimum(once, 2, budget), optimum(twice, 2, budget)) == (1, 2)
    found = searched([once], 2, budget)
    assert found.peak == max(replayed(in_turn(2, 4), {0: found.stages[0]})) <= budget
    assert 0 < found.floor <= 1 + 1e-6
    assert 1 <= found.extra <= searched([twice], 2, budget).extra


def pointwise() -> StageProblem:
    """Its second op may overwrite the result of the first."""
    ops = (
        Op("f1", ("x",), ("a",), 1.0, 0, "forward"),
        Op("f2", ("a",), ("b",), 1.0, 0, "forward"),
        Op("f3", ("b",), ("y",), 1.0, 0, "forward"),
        Op("(loss)", ("y",), ("(loss)",), 0.0, 0, "backward"),
        Op("b3", ("b", "g", "(loss)"), ("gx",), 1.0, 0, "backward"),
    )
    sizes = {"x": 2, "g": 1, "a": 10, "b": 10, "y": 1, "(loss)": 0, "gx": 1}
    tensors = tuple(starmap(Tensor, sizes.items()))
    graph = TrainingGraph("stage", tensors, ("x", "g"), ("y", "gx"), ops, never_rerun=("(loss)",))
    return StageProblem(graph, "(loss)", per_microbatch=("x",), tangents=("g",))


def test_a_result_that_is_written_into_an_operand_is_counted_once() -> None:
    twice, once = pointwise(), overwriting(pointwise())
    assert (all_kept(twice).transients.forward, all_kept(once).transients.forward) == (22, 13)
    budget = rank_peak(in_turn(1, 2), [all_kept(once)])
    assert budget == 15
    assert searched([once], 1, budget).peak == budget
    with pytest.raises(InfeasibleBudget):
        searched([twice], 1, budget)


class OnlyFloors(Exact):
    """Finds no plans, so that only known ones are candidates."""

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort) -> None:
        del graph, budget, starts, effort

    def least(self, graph: TrainingGraph, starts: Sequence[Plan], effort: Effort) -> Plan:
        return min((no_recompute(graph), *starts), key=lambda plan: plan.estimate.peak)


def test_a_floor_is_none_of_plans_that_write_into_new_tensors() -> None:
    """No plan that does so fits. The plan without recomputation fits, but is left out for what it keeps."""
    stage = overwriting(pointwise())
    plan = plan_from_runs(stage.graph, ("f1", "f2", "f3", "(loss)", "f1", "f2", "b3"), "recomputing")
    kept = stage.measured(plan).held.kept
    found = RankSearch([stage], in_turn(1, 2), 15, OnlyFloors(), starts=[[plan]], kept=[kept]).run()
    assert (found.extra, found.floor) == (2, 0)


@pytest.mark.parametrize("changed", [free, overwriting])
def test_one_byte_below_the_least_budget_is_refused(changed: Callable[[StageProblem], StageProblem]) -> None:
    stage = changed(free(chain_stage([3, 3, 2], [1.0, 2.0, 4.0])))
    with pytest.raises(InfeasibleBudget) as refused:
        searched([stage], 3, 0)
    least = refused.value.smallest
    assert searched([stage], 3, least).peak == least
    with pytest.raises(InfeasibleBudget) as again:
        searched([stage], 3, least - 1)
    assert again.value.smallest == least


def test_a_refusal_names_a_budget_at_which_little_is_recomputed() -> None:
    stage = free(chain_stage([3, 5, 2, 4], [50.0, 1.0, 50.0, 50.0]))
    with pytest.raises(InfeasibleBudget) as refused:
        searched([stage], 3, 0)
    cheap = refused.value.cheap
    assert refused.value.smallest < cheap <= 140 < rank_peak(in_turn(3, 6), [all_kept(stage)]) == 165
    assert searched([stage], 3, cheap).extra <= CHEAP * stage.graph.base_cost


class Working(OnlyFloors):
    """Takes all the effort that each search may take, and notes it by the search's problem."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, float]] = []

    def _work(self, graph: TrainingGraph, effort: Effort) -> None:
        self.taken.append((len(graph.ops), effort.left))
        effort.charge(moves=int(effort.left))

    def starts(self, graph: TrainingGraph, effort: Effort) -> Sequence[Plan]:
        self._work(graph, effort)
        return ()

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort) -> None:
        del budget, starts
        self._work(graph, effort)

    def least(self, graph: TrainingGraph, starts: Sequence[Plan], effort: Effort) -> Plan:
        self._work(graph, effort)
        return super().least(graph, starts, effort)

    def floor(self, graph: TrainingGraph, budget: int, effort: Effort) -> float:
        del budget
        self._work(graph, effort)
        return 0.0


def test_all_searches_of_a_rank_share_one_effort() -> None:
    """A stage in which recomputation saves next to nothing is not searched; else more where more can be saved."""
    large, small, tiny = (
        replace(free(chain_stage([bytes_] * layers, [1.0] * layers)), template=StagePlan(number))
        for number, (bytes_, layers) in enumerate(((4000, 6), (2000, 4), (1, 3)))
    )
    stages, planner = [large, small, tiny], Working()
    turns = zip(*(in_turn(2, 4, stage=number) for number in range(3)), strict=True)
    actions = tuple(action for turn in turns for action in turn)
    whole = rank_peak(actions, [all_kept(stage) for stage in stages])
    total = 10_000
    with pytest.raises(InfeasibleBudget):
        RankSearch(stages, actions, whole // 2, planner, Effort(moves=total)).run()
    sums = {
        stage.stage: math.fsum(moves for ops, moves in planner.taken if ops == len(problem.graph.ops))
        for stage, problem in ((all_kept(one), one) for one in stages)
    }
    assert (
        total / 2 < sum(sums.values()) <= total + 2 * LIMITS.per_op * MOVES_PER_SECOND * len(large.graph.ops)
    )
    assert sums[0] > sums[1] > 0 == sums[2]


def test_the_stages_of_a_rank_share_one_budget() -> None:
    """What the dear stage keeps, the cheap one recomputes."""
    dear, cheap = (
        replace(free(chain_stage([4, 4, 4], [cost] * 3)), template=StagePlan(number))
        for number, cost in ((0, 9.0), (1, 1.0))
    )
    actions = tuple(a for pair in zip(in_turn(2, 6), in_turn(2, 6, stage=1), strict=True) for a in pair)
    whole = rank_peak(actions, [all_kept(dear), all_kept(cheap)])
    budget = int(0.8 * whole)
    found = RankSearch([dear, cheap], actions, budget, Exact()).run()
    assert found.peak == max(replayed(actions, dict(enumerate(found.stages)))) <= budget
    assert found.stages[0].times.extra / 9 <= found.stages[1].times.extra
    assert 0 <= found.floor <= found.extra


def split_turn(k: int, w: int, microbatches: int) -> RankActions:
    """One forward, one input gradient, and weight gradients w micro-batches later."""
    actions: list[Action] = []
    for a in in_turn(k, microbatches):
        actions.append(replace(a, kind="I") if a.kind == "B" else a)
        if a.kind == "B" and a.microbatch >= w:
            actions.append(Action("W", 0, a.microbatch - w))
    return (*actions, *(Action("W", 0, m) for m in range(max(0, microbatches - w), microbatches)))


@pytest.mark.parametrize("w", [0, 2])
def test_a_deferred_micro_batch_is_charged_what_its_weight_gradients_need(w: int) -> None:
    stage = chain_stage([4, 3, 5], [2.0, 3.0, 1.0], split=True)
    actions = split_turn(3, w, 8)
    kept = all_kept(stage)
    # The batch, the other layers' inputs, the gradients of the layers' outputs; that of the first layer's input leaves.
    assert kept.held.deferred == 4 + (4 + 3) + (4 + 3 + 5)
    assert kept.transients.whole == 5 + 4
    whole = rank_peak(actions, [kept])
    found = RankSearch([stage], actions, whole - 1, Deferring()).run()
    assert found.peak == max(replayed(actions, {0: found.stages[0]})) < whole
    late = found.plans[0].schedule.index(Run(WEIGHTS))
    assert all(step not in found.plans[0].schedule[late:] for step in map(Run, ("b1", "b2", "b3")))


class Deferring(Exact):
    """Of the ops that the exhaustive search does not run twice at all it knows nothing: annealing does."""

    def within(
        self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort
    ) -> Plan | None:
        del starts, effort
        with suppress(InfeasibleBudget):
            return Anneal(time_limit=0.05).plan(graph, budget)
        return None

    def floor(self, graph: TrainingGraph, budget: int, _effort: Effort) -> float:
        return 0.0
