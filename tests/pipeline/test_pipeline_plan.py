"""Cuts and plans of a pipeline are within the budget by an independent replay, no slower than other cuts, and above
the lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from random import Random
from types import SimpleNamespace

import problems
import pytest
from replay import replayed
from stage_chains import WithoutStarts
from test_stage_slices import one_op_a_block

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph, UsageError
from rematplan.pipeline.schedules import schedule_named
from rematplan.planner.core import effort
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.pipeline import choose_cuts, rank_search
from rematplan.planner.pipeline.choose_cuts import PipelineSearch, Terms
from rematplan.planner.pipeline.messages import CONNECTING
from rematplan.planner.pipeline.rank_search import RankPlan, RankSearch, RankSearchLimits
from rematplan.planner.pipeline.stage_chain import StageChain, stage_chain
from rematplan.planner.pipeline.timeline import Link
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.pipeline import action_lists


class Blocks(WithoutStarts):
    """Plans by blocks, quick and the same each time."""

    def within(
        self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort
    ) -> Plan | None:
        del starts, effort
        return min(
            (p for p in (*ExactDP().curve(graph, ()), no_recompute(graph)) if p.estimate.peak <= budget),
            key=lambda p: p.estimate.cost,
            default=None,
        )

    def least(self, graph: TrainingGraph, starts: Sequence[Plan], effort: Effort) -> Plan:
        del starts, effort
        return min((*ExactDP().curve(graph, ()), no_recompute(graph)), key=lambda p: p.estimate.peak)

    def floor(self, graph: TrainingGraph, budget: int, effort: Effort) -> float:
        del graph, budget, effort
        return 0.0


def chained(layers: int = 7) -> StageChain:
    graph = problems.chain(layers)
    gradients = {t: t.replace("dconv", "conv") for t in graph.outputs if t.endswith(".dw")}
    assert gradients
    weights = [t for t in graph.inputs if t.startswith("w")]
    pairs = dict(zip(sorted(gradients, key=graph.producer.__getitem__, reverse=True), weights, strict=True))
    return stage_chain(graph, one_op_a_block(graph), pairs)


def search(chain: StageChain, name: str, budget: int, ranks: int = 2, **terms: object) -> PipelineSearch:
    schedule = schedule_named(name, ranks, 2 * ranks)
    return PipelineSearch(chain, schedule, Terms(budget, **terms), Blocks())


AMPLE = 10**9


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("1f1b", 0.9), ("gpipe", 0.9), ("interleaved", 0.97)),
        *(("zbv", 1.0), ("interleaved-zb", 1.0), ("dualpipev", 1.0)),
    ],
)
def test_peaks_are_those_of_a_replay_and_within_the_budget(name: str, share: float) -> None:
    chain = chained()
    whole = search(chain, name, AMPLE, optimizer=2.0).run()
    assert all(stage.times.extra == 0 for stage in whole.stages)
    budget = int(share * max(whole.peaks))
    for found, limit in ((whole, AMPLE), (search(chain, name, budget, optimizer=2.0).run(), budget)):
        for rank, (row, stages) in enumerate(
            zip(found.schedule.actions, found.schedule.stage_of_rank, strict=True)
        ):
            assert max(replayed(row, {s: found.stages[s] for s in stages})) == found.peaks[rank] <= limit
        assert found.times[found.slowest].total >= found.floor - 1e-6
        assert sum(s.times.total - s.times.extra for s in found.stages) == pytest.approx(
            chain.graph.base_cost
        )


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_no_other_cuts_end_sooner(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_lists, "SENT_OUTPUTS_ARE_FREED", False)  # with it, nothing fits a share of 0.9
    chain, link = chained(6), Link(2.0, 512.0)
    whole = search(chain, "1f1b", AMPLE, link=link).run()
    budget = int(share * max(whole.peaks))
    found = search(chain, "1f1b", budget, link=link).run()
    best, slowest = math.inf, math.inf
    for cuts in combinations(chain.allowed(), 1):
        try:
            other = search(chain, "1f1b", budget, link=link).run(cuts)
        except InfeasibleBudget:
            continue
        best = min(best, other.timeline.makespan)
        slowest = min(slowest, other.times[other.slowest].total)
    assert found.timeline.makespan == pytest.approx(best)
    assert found.floor <= slowest + 1e-6


@pytest.mark.parametrize(("name", "seed"), [("zbv", 1), ("zbv", 7), ("interleaved", 7)])
def test_the_cuts_of_ranks_with_two_stages_are_the_best(name: str, seed: int) -> None:
    """The cuts with the fastest slowest stage, and those that differ by one block, are at least 3 % slower. The budget
    is ample, so lower bounds of times are times."""
    rng, tape = Random(seed), problems.Tape("uneven")
    y = tape.x
    for _ in range(12):
        y = tape.conv(y, 1024 * rng.randint(1, 9))
    graph = tape.finish(y)
    chain = stage_chain(graph, one_op_a_block(graph))
    found, other = search(chain, name, AMPLE).run(), search(chain, name, AMPLE)
    every = [other._makespan(cuts) for cuts in combinations(chain.allowed(), 3)]
    assert found.timeline.makespan == pytest.approx(min(every))


def test_no_rank_and_no_cuts_take_the_time_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still, except that each search for the plans of a rank takes as long as it may."""
    now, given = [0.0], list[float]()

    class Slow(RankSearch):
        def run(self, thorough: bool = True) -> RankPlan:
            given.append(self.effort.total)
            now[0] += self.effort.total
            return super().run(thorough)

    monkeypatch.setattr(choose_cuts, "RankSearch", Slow)
    monkeypatch.setattr(effort, "time", SimpleNamespace(thread_time=lambda: now[0], monotonic=lambda: 0.0))
    one = search(chained(), "1f1b", AMPLE, ranks=4)
    one.seconds = 8.0
    one.run((2, 4, 6))
    assert given == [2.0] * 4
    given.clear()
    several = search(chained(), "1f1b", AMPLE, ranks=4)
    several.seconds = 8.0
    several.run()
    assert given[:4] == [1.0] * 4
    assert several._left >= 1.0


@pytest.mark.parametrize("budget", [1000, 600, 400])
def test_an_op_that_only_the_backward_needs_may_run_there_without_extra_time(budget: int) -> None:
    """Each layer computes ``s`` in its forward for its backward alone. So no plan must keep or recompute it."""
    tensors, ops, back, layers = [Tensor("x0", 10), Tensor("loss", 0), Tensor("g6", 10)], [], [], 6
    for i in range(1, layers + 1):
        tensors += [Tensor(f"x{i}", 10), Tensor(f"s{i}", 100), Tensor(f"g{i - 1}", 10)]
        ops.append(Op(f"f{i}", (f"x{i - 1}",), (f"x{i}",), 1.0, 0, "forward"))
        ops.append(Op(f"s{i}", (f"x{i - 1}",), (f"s{i}",), 10.0, 0, "forward"))
        back.insert(0, Op(f"b{i}", (f"g{i}", f"s{i}"), (f"g{i - 1}",), 2.0, 0, "backward"))
    ops.append(Op("loss", (f"x{layers}",), ("loss",), 0.0, 0, "forward"))
    back.insert(0, Op("seed", ("loss", f"x{layers}"), (f"g{layers}",), 0.1, 0, "backward"))
    graph = TrainingGraph("lazy", tuple(tensors), ("x0",), ("loss", "g0"), (*ops, *back))
    blocks = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11, 12)]
    found = search(stage_chain(graph, blocks, {}), "1f1b", budget)
    assert found.floor == pytest.approx(39.1)
    lazy = [*graph.ops[:12:2], graph.ops[12], *graph.ops[13:14]]
    lazy += [op for i in range(layers, 0, -1) for op in (graph.op[f"s{i}"], graph.op[f"b{i}"])]
    assert plan_from_runs(graph, [op.name for op in lazy], "lazy").estimate.cost == graph.base_cost


def test_the_rank_that_does_not_fit_is_named_with_its_least_budget() -> None:
    chain = chained()
    for cuts in (None, (2,)):
        with pytest.raises(
            InfeasibleBudget, match=r"rank [01]: budget .* is below the smallest found"
        ) as refused:
            search(chain, "1f1b", 20_000).run(cuts)
        assert refused.value.exit_status == 3
    least = refused.value.smallest
    assert max(search(chain, "1f1b", least).run((2,)).peaks) == least
    with pytest.raises(InfeasibleBudget) as again:
        search(chain, "1f1b", least - 1).run((2,))
    assert (again.value.strategy, again.value.smallest) == (refused.value.strategy, least)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_if_no_cuts_fit_the_least_budget_is_that_of_the_cuts_that_need_least(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this budget the search finds plans, and with one byte less it does not. Other cuts need at least as much."""
    monkeypatch.setattr(rank_search, "LIMITS", RankSearchLimits(grid=2, refined=0, descents=0, cheaper=0))
    chain = chained(5)

    def least(cuts: tuple[int, ...] | None) -> int:
        with pytest.raises(InfeasibleBudget) as refused:
            search(chain, name, 0).run(cuts)
        return refused.value.smallest

    found = least(None)
    assert max(search(chain, name, found).run().peaks) <= found
    with pytest.raises(InfeasibleBudget):
        search(chain, name, found - 1).run()
    stages = search(chain, name, 0).schedule.stages
    assert found == min(map(least, combinations(chain.allowed(), stages - 1)))


def test_states_grow_with_the_optimizer_and_the_batch_with_micro_batches() -> None:
    chain = chained()
    plain, adam = (search(chain, "1f1b", AMPLE, optimizer=n).run((3,)) for n in (0.0, 2.0))
    weights = [512 * 3, 512 * 4]
    assert [
        b.standing.states - a.standing.states for a, b in zip(plain.stages, adam.stages, strict=True)
    ] == [2 * w for w in weights]
    assert [s.held.gradients for s in plain.stages] == weights
    assert [s.standing.torch_bytes for s in plain.stages] == [CONNECTING] * 2
    assert [(s.messages.sent, s.messages.returned) for s in plain.stages] == [
        (chain.sends[3], 0),
        (0, chain.returns[3]),
    ]
    batch = search(chain, "1f1b", AMPLE, batch=frozenset({"x"})).run((3,))
    assert (
        batch.stages[0].standing.torch_bytes - plain.stages[0].standing.torch_bytes
        == 4 * chain.graph.size["x"]
    )
    assert plain.stages[0].standing.states - batch.stages[0].standing.states == chain.graph.size["x"]


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(UsageError, match="into 9 stages, only into 8"):
        search(chained(), "1f1b", AMPLE, ranks=9).run()
