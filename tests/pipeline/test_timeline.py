"""Timelines of schedules equal known formulas and an independent replay."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from list_checker import Waits, replayed

from rematplan.ir import ProblemError, UsageError
from rematplan.pipeline.schedules import ONE_STAGE, SCHEDULES, VIRTUAL, schedule_named
from rematplan.planner.pipeline.actions import PipelineSchedule, schedule_of_rows
from rematplan.planner.pipeline.bubble_formulas import FORMULAS
from rematplan.planner.pipeline.gpipe_and_1f1b import one_stage_a_rank
from rematplan.planner.pipeline.timeline import Link, StageTimes, replay

NUMBERS = st.floats(0, 9).map(lambda x: round(x, 2))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineSchedule, list[StageTimes], Link, float, int | None]:
    ranks = draw(st.integers(1, 4))
    name = draw(st.sampled_from(SCHEDULES))
    microbatches = ranks * draw(st.integers(2, 4))
    schedule = schedule_named(name, ranks, microbatches, hop=draw(NUMBERS))
    sizes = st.integers(0, 20)
    times = [
        StageTimes(*(draw(NUMBERS) for _ in range(3)), draw(sizes), draw(sizes))
        for _ in range(schedule.stages)
    ]
    link = Link(draw(NUMBERS), draw(st.floats(0.5, 9)))
    return schedule, times, link, draw(NUMBERS), draw(st.none() | st.integers(1, 4))


def spans(schedule, times, link, overhead, credits):
    line = replay(schedule, times, link, overhead, credits)
    return {(r, i): (s.start, s.end) for r, row in enumerate(line.rows) for i, s in enumerate(row)}


def same_as_checked(schedule, times, link, overhead, credits) -> None:
    try:
        wanted = replayed(schedule, times, link.latency, link.bandwidth, overhead, credits)
    except Waits:
        with pytest.raises(ProblemError, match="deadlock"):
            replay(schedule, times, link, overhead, credits)
        return
    found = spans(schedule, times, link, overhead, credits)
    assert found.keys() == wanted.keys()
    for at, pair in wanted.items():
        assert found[at] == pytest.approx(pair)


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_an_independent_replay_finds_the_same_times(pipeline) -> None:
    same_as_checked(*pipeline)


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(0, 10**6))
def test_disordered_lists_are_refused_where_they_deadlock(pipeline, seed) -> None:
    schedule, *rest = pipeline
    rng = random.Random(seed)
    rows = [[(a.kind, a.stage, a.microbatch) for a in row] for row in schedule.actions]
    row = rng.choice(rows)
    row.append(row.pop(rng.randrange(len(row))))
    try:
        moved = schedule_of_rows(schedule.name, schedule.stages, schedule.microbatches, rows)
    except ProblemError:  # an F behind its own B
        return
    same_as_checked(moved, *rest)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4, 8])
def test_bubbles_are_those_of_the_formulas(name, ranks, rounds) -> None:
    for each in (2, 3) if name in ("interleaved", "interleaved-zb") else (None,):
        schedule = schedule_named(name, ranks, ranks * rounds, each=each)
        line = replay(schedule, [StageTimes(1, 1, 1)] * schedule.stages)
        v = schedule.stages // ranks
        assert line.bubble == pytest.approx(FORMULAS[name].bubble(ranks, ranks * rounds, v), abs=1e-9)
        work = 3 * v * ranks * rounds
        assert line.busy == (work,) * ranks
    if not any(a.kind == "W" for row in schedule.actions for a in row):
        uneven = replay(schedule, [StageTimes(1, 3)] * schedule.stages)
        assert uneven.bubble == pytest.approx(FORMULAS[name].bubble(ranks, ranks * rounds, v), abs=1e-9)


@pytest.mark.parametrize(("name", "pauses"), [("zbv", 1), ("interleaved-zb", 1), ("dualpipev", 2)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_schedules_pause_for_the_fill_alone(name, pauses, ranks) -> None:
    schedule = schedule_named(name, ranks, 4 * ranks)
    line = replay(schedule, [StageTimes(5, 5, 5)] * schedule.stages)
    assert {line.makespan - busy for busy in line.busy} == {pauses * (ranks - 1) * 5}


def ideal_utilisation(ranks: int, microbatches: int, hop: float) -> float:
    """An upper bound for any order: P − 1 forwards, hops, the last rank's work of M units, P − 1 backwards, hops."""
    return microbatches / (microbatches + (ranks - 1) * (1 + 2 * hop))


@pytest.mark.parametrize("hop", [0.1, 0.3, 0.5])
def test_dataflow_reaches_the_ideal_over_slow_links(hop) -> None:
    ranks, microbatches, times, link = 8, 256, [StageTimes(1, 2)] * 8, Link(3 * hop)
    plain = replay(schedule_named("1f1b", ranks, microbatches), times, link)
    flow = replay(schedule_named("dataflow", ranks, microbatches, hop=hop), times, link)
    assert 1 - flow.bubble == pytest.approx(ideal_utilisation(ranks, microbatches, hop))
    # While a micro-batch travels to the last rank and back, the first has work for as many as there are ranks.
    bound = ranks / (ranks + 2 * (ranks - 1) * hop)
    assert 0.97 * bound < 1 - plain.bubble <= bound


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.floats(0, 2), st.data())
def test_no_order_goes_beyond_the_ideal(ranks, microbatches, hop, data) -> None:
    in_flight = sorted((data.draw(st.integers(1, 3 * ranks)) for _ in range(ranks)), reverse=True)
    line = replay(one_stage_a_rank("any", in_flight, microbatches), [StageTimes(1, 2)] * ranks, Link(3 * hop))
    assert 1 - line.bubble <= ideal_utilisation(ranks, microbatches, hop) + 1e-9


def test_dataflow_over_links_without_delay_is_1f1b() -> None:
    assert schedule_named("dataflow", 5, 11).actions == schedule_named("1f1b", 5, 11).actions


def test_a_hop_adds_one_in_flight_up_to_half_and_two_beyond() -> None:
    def ahead(hop):
        rows = schedule_named("dataflow", 4, 64, hop=hop).actions
        return [next(i for i, a in enumerate(row) if a.kind == "B") for row in rows]

    assert ahead(0.01) == ahead(0.5) == [7, 5, 3, 1]
    assert ahead(0.51) == [10, 7, 4, 1]


def test_a_message_waits_for_the_one_before_it_on_the_link() -> None:
    times = [StageTimes(1, 1, sends=10), StageTimes(1, 1)]
    line = replay(schedule_named("gpipe", 2, 3), times, Link(latency=2, bandwidth=2))
    starts = [s.start for s in line.rows[1]][:3]
    assert starts == [1 + 5 + 2, 1 + 10 + 2, 1 + 15 + 2]


def test_a_message_is_sent_where_the_row_says() -> None:
    """PyTorch runs a forward and a backward of DualPipeV as a pair and sends both messages at the pair's end."""
    rows = [
        [("F", 0, 0), ("F", 0, 1), ("SEND_F", 0, 0), ("SEND_F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
        [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1), ("SEND_B", 1, 0)],
    ]
    line = replay(schedule_of_rows("mine", 2, 2, rows), [StageTimes(1, 1)] * 2, Link(latency=2))
    starts = [{(s.action.kind, s.action.microbatch): s.start for s in row} for row in line.rows]
    assert starts[1] == {("F", 0): 4, ("F", 1): 5, ("B", 0): 6, ("B", 1): 7}
    assert starts[0] == {("F", 0): 0, ("F", 1): 1, ("B", 0): 10, ("B", 1): 11}


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.data())
def test_an_independent_replay_sends_as_late_as_the_rows_say(pipeline, data) -> None:
    schedule, *rest = pipeline
    rows = []
    for row in schedule.actions:
        late: dict[int, list[tuple[str, int, int]]] = {}
        for at, a in enumerate(row):
            if a.kind != "W" and data.draw(st.booleans()):
                half = "SEND_F" if a.kind == "F" else "SEND_B"
                behind = min(at + data.draw(st.integers(0, 2)), len(row) - 1)
                late.setdefault(behind, []).append((half, a.stage, a.microbatch))
        rows.append(
            [
                entry
                for at, a in enumerate(row)
                for entry in ((a.kind, a.stage, a.microbatch), *late.get(at, ()))
            ]
        )
    moved = schedule_of_rows(schedule.name, schedule.stages, schedule.microbatches, rows)
    same_as_checked(moved, *rest)


def test_stages_of_one_rank_need_no_message() -> None:
    schedule = schedule_named("zbv", 2, 4)
    line = replay(schedule, [StageTimes(1, 1, 1)] * 4, Link(latency=100))
    first = {s.action.stage: s for s in reversed(line.rows[1]) if s.action.kind == "F"}
    assert first[2].start == first[1].end


def test_a_deadlock_names_its_first_blocked_action() -> None:
    rows = [
        [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)],
        [("F", 1, 1), ("B", 1, 1), ("F", 1, 0), ("B", 1, 0)],
    ]
    with pytest.raises(ProblemError, match="mine: deadlock: action 1F1 of rank 1 waits forever for 0F1"):
        replay(schedule_of_rows("mine", 2, 2, rows), [StageTimes(1, 1)] * 2)


def test_blocking_sends_without_credits_enough_deadlock() -> None:
    # Both ends send before they read: the first begins 6 forwards, the second 6 backwards only after as many forwards.
    rows = [
        [*(("F", 0, m) for m in range(6)), *(("B", 0, m) for m in range(6))],
        [
            ("F", 1, 0),
            ("B", 1, 0),
            ("B", 1, 1),
            *(("F", 1, m) for m in range(2, 6)),
            *(("B", 1, m) for m in range(2, 6)),
        ],
    ]
    rows[1].insert(1, ("F", 1, 1))
    schedule = schedule_of_rows("mine", 2, 6, rows)
    times = [StageTimes(1, 1)] * 2
    assert replay(schedule, times, credits=2).makespan >= replay(schedule, times).makespan
    with pytest.raises(ProblemError, match=r"rank . waits forever for a credit: 1 of its messages"):
        replay(schedule, times, credits=1)


def test_overhead_is_paid_by_each_action() -> None:
    schedule = schedule_named("1f1b", 2, 4)
    plain = replay(schedule, [StageTimes(1, 2)] * 2)
    slow = replay(schedule, [StageTimes(1.5, 2.5)] * 2)
    assert replay(schedule, [StageTimes(1, 2)] * 2, overhead=0.5) == replace(slow, schedule=plain.schedule)


@pytest.mark.parametrize("name", VIRTUAL)
def test_lists_of_torch_run_each_stage_on_its_rank(name) -> None:
    schedule = schedule_named(name, 4, 8)
    style = [(0, 4), (1, 5), (2, 6), (3, 7)] if name.startswith("inter") else [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert schedule.stage_of_rank == tuple(style)
    kinds = {a.kind for row in schedule.actions for a in row}
    assert kinds == {"interleaved": {*"FB"}, "dualpipev": {*"FBIW"}}.get(name, {*"FIW"})


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "each", "text"),
    [
        ("best", 2, 4, None, "unknown schedule 'best'; known: gpipe, 1f1b"),
        ("gpipe", 2, 4, 2, "gpipe has one stage on each rank, not 2"),
        ("1f1b", 4, 3, None, "at least as many micro-batches as ranks: 4, not 3"),
        ("zbv", 2, 4, 3, "zbv needs 2 stages on each rank, not 6 stages on 2 ranks"),
        ("interleaved", 4, 11, None, "interleaved: .*multiple"),
        ("dualpipev", 4, 4, None, "dualpipev: .*at least as many microbatches as stages"),
    ],
)
def test_impossible_schedules_are_refused(name, ranks, microbatches, each, text) -> None:
    with pytest.raises(UsageError, match=text):
        schedule_named(name, ranks, microbatches, each=each)


def test_one_stage_schedules_run_what_torch_runs() -> None:
    """The order that torch's own loops run in, which their classes do not show."""
    rows = [" ".join(map(str, row)) for row in schedule_named("1f1b", 2, 3).actions]
    assert rows == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert set(ONE_STAGE) == {"gpipe", "1f1b", "dataflow"}
