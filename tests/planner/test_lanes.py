"""Plans on two lanes: at any speed of the lanes the promised peak holds, data is available, and no lane waits
forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import Op, ProblemError, Tensor, TrainingGraph
from rematplan.ir.problem_json import problem_to_json
from rematplan.planner.core.lane_schedule import Lanes, Sharing, place
from rematplan.planner.core.plan import Plan, plan_from_json, plan_from_runs, plan_to_json
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.overlap.place_on_lanes import on_two_lanes

PROFILE = settings(max_examples=100, deadline=None, derandomize=True)


def with_inverses(graph: TrainingGraph, rng: Random) -> TrainingGraph:
    """The problem with an inverse for some of its ops: one of what they read, from what they write and the rest."""
    made = {t for op in graph.ops for t in op.writes}
    inverses = []
    for op in graph.ops:
        own = [t for t in op.reads if t in made]
        if own and op.writes and op.phase == "forward" and rng.random() < 0.5:
            back = rng.choice(own)
            reads = (*op.writes, *(t for t in op.reads if t != back))
            inverses.append(
                Op(f"invert {op.name}", reads, (back,), rng.choice([0.0, 1.0, 3.0]), rng.choice([0, 70]))
            )
    return replace(graph, inverses=tuple(inverses))


def random_plan(graph: TrainingGraph, rng: Random, extra: int) -> Plan:
    """The base order with ops and inverses run (again) wherever all that they read was written before."""
    runs = [op.name for op in graph.ops]
    for _ in range(extra if runs else 0):
        at = rng.randint(0, len(runs))
        before = set(graph.inputs).union(*(graph.op[n].writes for n in runs[:at]))
        again = [*runs[:at], *(i.name for i in graph.inverses if before.issuperset(i.reads))]
        if again:
            runs.insert(at, rng.choice(again))
    return plan_from_runs(graph, runs, "random")


class TooEarly(Exception):
    """A run reads what another has not made yet, or draws numbers again that were not drawn yet."""


class Machine:
    """Two lanes as they run: each holds what it has yet to read, and frees the rest. It knows of the planner's lanes
    which run is on which, and the waits, and nothing else."""

    def __init__(self, graph: TrainingGraph, plan: Plan) -> None:
        assert plan.lanes is not None
        self.graph, self.runs, self.lanes = graph, runs_of(plan.schedule), plan.lanes
        self.fixed = set(graph.inputs)
        recovered = set(plan.lanes.recovery)
        self.lane_of = [int(at in recovered) for at in range(len(self.runs))]
        after = range(plan.lanes.fork, len(self.runs))
        self.order = [[at for at in after if self.lane_of[at] == lane] for lane in (0, 1)]
        self.awaited: dict[int, list[int]] = {}
        for run, other in plan.lanes.waits:
            self.awaited.setdefault(run, []).append(other)
        # A copy is (tensor, the run that made it); by lane the runs there that read it. The end reads the outputs.
        self.readers: dict[tuple[str, int], tuple[set[int], set[int]]] = {}
        self.reads: list[list[tuple[str, int]]] = []
        self.drawn = {n: self.runs.index(n) for n in graph.ordered if n in self.runs}
        maker: dict[str, int] = {}
        for at, name in enumerate(self.runs):
            self.reads.append([(t, maker[t]) for t in graph.op[name].reads if t not in self.fixed])
            for copy in self.reads[at]:
                self.readers[copy][self.lane_of[at]].add(at)
            for t in graph.op[name].writes:
                maker[t] = at
                self.readers[t, at] = (set(), set())
        for t in graph.outputs:
            if t not in self.fixed:
                self.readers[t, maker[t]][0].add(len(self.runs))

    def held(self, done: set[int], busy: list[int]) -> int:
        """Bytes while some runs are over and others under way."""
        total = self.graph.input_bytes
        for (tensor, made), readers in self.readers.items():
            begun = made in done or made in busy
            waiting = made in busy or any(not its <= done for its in readers)
            total += self.graph.size[tensor] if begun and waiting else 0
        return total + sum(self.graph.op[self.runs[at]].workspace for at in busy)

    def states(self, choose: Callable[[list[int]], list[int]]) -> list[int]:
        """Bytes held in all states that are met when, of the lanes that may go on, those do that are chosen in turn."""
        before = set(range(self.lanes.fork))
        seen, found, stack = set(), [], [(0, 0)]
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            done = before.union(*(order[: p // 2] for order, p in zip(self.order, state, strict=True)))
            busy = [o[p // 2] for o, p in zip(self.order, state, strict=True) if p % 2]
            for at in busy:
                first = self.drawn.get(self.runs[at], at)
                if not done.issuperset([made for _, made in self.reads[at]] + [first] * (first != at)):
                    raise TooEarly(at)
            found.append(self.held(done, busy))
            able = [lane for lane in (0, 1) if self.able(lane, state[lane], done)]
            assert able or state == tuple(2 * len(o) for o in self.order), "the lanes wait for ever"
            for lane in choose(able) if able else ():
                stack.append((state[0] + (lane == 0), state[1] + (lane == 1)))
        return found

    def able(self, lane: int, progress: int, done: set[int]) -> bool:
        if progress % 2:
            return True
        if progress == 2 * len(self.order[lane]):
            return False
        return all(other in done for other in self.awaited.get(self.order[lane][progress // 2], ()))


def draw(problems, seed: int, ops: int) -> tuple[TrainingGraph, Plan, Random]:
    rng = Random(seed)
    made = rng.choice([problems.scrambled, problems.scrambled, problems.random_training])
    graph = with_inverses(made(rng, ops), rng)
    return graph, random_plan(graph, rng, rng.randint(1, ops)), rng


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_no_interleaving_exceeds_the_promised_peak(problems, seed):
    graph, plan, rng = draw(problems, seed, 12)
    budget = plan.estimate.peak + rng.choice([0, 0, 10, 1000, 10**6])
    laned = on_two_lanes(graph, plan, budget)
    if laned is None:
        assert not place(graph, runs_of(plan.schedule)).recovery
        return
    assert plan.estimate.peak <= laned.lanes.peak <= budget
    machine = Machine(graph, laned)
    assert max(machine.states(lambda able: [rng.choice(able)])) <= laned.lanes.peak
    one_by_one = [machine.held(set(range(at)), [at]) for at in range(len(machine.runs))]
    assert max(one_by_one) == plan.estimate.peak
    met = machine.states(lambda able: able)
    assert max([graph.input_bytes, *one_by_one[: laned.lanes.fork], *met]) == laned.lanes.peak


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_no_wait_is_redundant(problems, seed):
    """Without any one of its waits a lane would read too early, or hold more than the budget."""
    graph, plan, rng = draw(problems, seed, 8)
    budget = plan.estimate.peak + rng.choice([0, 10, 1000])
    laned = on_two_lanes(graph, plan, budget)
    for gone in laned.lanes.waits if laned else ():
        waits = tuple(w for w in laned.lanes.waits if w != gone)
        machine = Machine(graph, replace(laned, lanes=replace(laned.lanes, waits=waits)))
        try:
            met = machine.states(lambda able: able)
        except TooEarly:
            continue
        assert max(met) > budget


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_two_lanes_take_no_longer_than_one(problems, seed):
    graph, plan, rng = draw(problems, seed, 12)
    budget = plan.estimate.peak + rng.choice([0, 10, 10**6])
    speeds = (0.5, 0.625, 0.8, 1.0)
    spans = []
    for speed in speeds:
        laned = on_two_lanes(graph, plan, budget, Sharing(speed))
        if laned is None:
            return
        assert laned.lanes.speed == speed
        spans.append(laned.lanes.makespan)
    cost = plan.estimate.cost
    assert spans[0] == pytest.approx(cost)
    assert sorted(spans, reverse=True) == pytest.approx(spans)
    recovered = sum(graph.op[runs_of(laned.schedule)[at]].cost for at in laned.lanes.recovery)
    assert cost - spans[-1] <= min(recovered, cost - recovered) + 1e-9
    slow = on_two_lanes(graph, plan, budget, Sharing(1.0, handover=2.0, start=7.0))
    assert spans[-1] + 7 <= slow.lanes.makespan + 1e-9 <= spans[-1] + 7 + 2 * len(laned.lanes.waits) + 2e-9


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_plan_files_contain_the_lanes(problems, checker, seed):
    graph, plan, rng = draw(problems, seed, 12)
    laned = on_two_lanes(graph, plan, plan.estimate.peak + rng.choice([0, 10, 10**6]))
    if laned is None:
        return
    data = json.loads(json.dumps(plan_to_json(laned)))
    assert checker.replay(problem_to_json(graph), data)["peak"] == laned.estimate.peak == data["peak"]
    assert plan_from_json(data, graph) == laned
    data["lanes"]["peak"] = 0
    assert plan_from_json(data, graph) == laned
    if laned.peak:
        with pytest.raises(ProblemError, match="over its budget"):
            plan_from_json(data | {"budget": laned.peak - 1}, graph)
    for gone in laned.lanes.waits:
        data["lanes"]["waits"] = [list(w) for w in laned.lanes.waits if w != gone]
        with suppress(ProblemError):  # it would not wait for what it reads
            assert plan_from_json(data | {"budget": None}, graph).lanes.peak > laned.lanes.peak


def recovering(blocks: int) -> tuple[TrainingGraph, Plan]:
    """A chain of which each block's tensor comes back, from its successor's, just before the gradient that reads it."""
    names = [f"x{k}" for k in range(blocks + 1)]
    tensors = [Tensor(n, 100) for n in names] + [Tensor(f"g{k}", 100) for k in range(blocks + 1)]
    forward = [Op(f"f{k}", (names[k],), (names[k + 1],), 1.0, 0, "forward") for k in range(blocks)]
    back = [Op(f"b{blocks}", (names[-1],), (f"g{blocks}",), 2.0, 0, "backward")]
    back += [
        Op(f"b{k}", (f"g{k + 1}", names[k]), (f"g{k}",), 2.0, 0, "backward") for k in reversed(range(blocks))
    ]
    inverses = tuple(Op(f"i{k}", (names[k + 1],), (names[k],), 1.0) for k in range(1, blocks))
    graph = TrainingGraph("chain", tuple(tensors), ("x0",), ("g0",), (*forward, *back), inverses)
    runs = [op.name for op in forward] + [f"b{blocks}"]
    for k in reversed(range(blocks)):
        runs += ([f"i{k}"] if k else []) + [f"b{k}"]
    return graph, plan_from_runs(graph, runs, "by hand")


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 9])
def test_a_chain_recovers_one_block_ahead(blocks):
    graph, plan = recovering(blocks)
    tight = on_two_lanes(graph, plan, plan.estimate.peak, Sharing(1.0))
    if blocks == 1:  # nothing has to come back
        assert tight is None
        return
    assert tight.lanes.peak == plan.estimate.peak
    ahead = on_two_lanes(graph, plan, plan.estimate.peak + 100, Sharing(1.0))
    assert ahead.lanes.peak == plan.estimate.peak + (100 if blocks > 2 else 0)
    # Of all that comes back everything runs beside a gradient, which takes twice as long.
    assert ahead.lanes.makespan == plan.estimate.cost - (blocks - 1)
    assert tight.lanes.makespan >= ahead.lanes.makespan


def test_a_larger_budget_lets_recovery_run_further_ahead():
    graph, plan = recovering(9)
    peaks = [on_two_lanes(graph, plan, plan.estimate.peak + 100 * k).lanes.peak for k in range(9)]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) > 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fork": 99}, "must be after the fork"),
        ({"recovery": [1]}, "must be after the fork"),
        ({"recovery": [6, 4]}, "must be after the fork"),
        ({"waits": [(99, 4)]}, "cannot wait"),
        ({"waits": [(4, 5)]}, "cannot wait"),
        ({"waits": [(7, 5)]}, "on one lane"),
        ({"waits": []}, "does not wait for a tensor that it reads"),
    ],
)
def test_lanes_that_do_not_fit_are_refused(change, said):
    graph, plan = recovering(3)
    laned = on_two_lanes(graph, plan, 10**6)
    data = json.loads(json.dumps(plan_to_json(replace(laned, lanes=replace(laned.lanes, **change)))))
    with pytest.raises(ProblemError, match=said):
        plan_from_json(data, graph)
    for field in ("fork", "recovery", "waits", "peak", "makespan", "speed"):
        data = json.loads(json.dumps(plan_to_json(laned)))
        del data["lanes"][field]
        with pytest.raises(ProblemError, match="missing"):
            plan_from_json(data, graph)


def test_a_plan_without_a_backward_half_has_one_lane():
    graph, plan = recovering(3)
    plain = replace(graph, ops=tuple(replace(op, phase=None) for op in graph.ops))
    assert on_two_lanes(plain, plan, 10**6) is None
    assert isinstance(on_two_lanes(graph, plan, 10**6).lanes, Lanes)
    assert on_two_lanes(graph, plan, plan.estimate.peak - 1) is None
