"""Laws of two lanes as they run: the bits of one lane, whoever is faster; nobody hangs, no thread stays."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as kept
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from planned_steps import PlannedStep, bound, problem, results, run_once, verify
from torch import Tensor, nn

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.module.verification import untouched
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.overlap.place_on_lanes import on_two_lanes
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.reversible import Reversible
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.execute import lanes
from rematplan.runtime.execute.compile import Halves, compile_halves, named_tensors
from rematplan.runtime.execute.lanes import Lane, recovery_stream, stream_recorder, two_lanes
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.inversion.find_inverses import with_inverses
from rematplan.runtime.problem.loss_boundary import LOSS, split_at_loss

CPU = torch.device("cpu")


class Couplings(nn.Module):
    """A chain of blocks, each of one function, whose halves change places; with dropout and batch norm inside."""

    def __init__(self, blocks: int, ordinary: bool = False) -> None:
        super().__init__()
        self.ordinary = ordinary
        self.functions = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16)
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        for f in self.functions:
            a, b = (a + f(a), b) if self.ordinary else (b, a + f(b))
        return torch.cat([a, b], -1).square().mean()


Case = tuple[nn.Module, tuple[Tensor, ...], CapturedStep, TrainingGraph, Plan]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@kept
def made(blocks: int, cache: Path, ordinary: bool = False) -> Case:
    """The step and its leanest plan: by inversion, or by recomputation where nothing inverts.

    Tests share the module, of which runs change the statistics of batch norms alone.
    """
    torch.manual_seed(blocks)
    module, batch = Couplings(blocks, ordinary), (torch.randn(64, 32),)
    step = with_inverses(capture(module, batch, "couplings"), named_tensors(module)).step
    graph = problem(step, profile_costs(step, cache=cache))
    return module, batch, step, graph, (ChenSqrt() if ordinary else Reversible()).curve(graph, ())[-1]


class Wrapped:
    """A call's function with something to do before it."""

    __name__ = "wrapped"

    def __init__(self, call: Call, before: Callable[[], Any]) -> None:
        self.target, self.before = call.target, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.before()
        return self.target(*args, **kwargs)


def wrapped(step: CapturedStep, before: Callable[[Call], Callable[[], Any] | None]) -> CapturedStep:
    """The step with something to do before some of its ops, found by call."""

    def wrap(call: Call) -> Call:
        first = None if call.is_view else before(call)
        return call if first is None else replace(call, target=Wrapped(call, first))

    return replace(step, calls=tuple(map(wrap, step.calls)), inverses=tuple(map(wrap, step.inverses)))


def slowed(step: CapturedStep, rng: Random) -> CapturedStep:
    """The step with ops that take their time, some more than others."""
    return wrapped(step, lambda call: partial(time.sleep, rng.choice([0.0, 0.0, 0.0, 0.002])))


@pytest.mark.parametrize("ordinary", [False, True], ids=["inverted", "recomputed"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_two_lanes_give_the_bits_of_one(blocks: int, ordinary: bool, cache: Path) -> None:
    module, batch, step, graph, plan = made(blocks, cache, ordinary)
    laned = [on_two_lanes(graph, plan, plan.estimate.peak + more) for more in (0, 2**14, 2**40)]
    if blocks == 1 and plan.estimate.cost == graph.base_cost:
        assert laned == [None] * 3
    for each in laned:
        if each is None:
            continue
        for timing in range(3):
            slow = slowed(step, Random(timing)) if timing else step
            found = results(PlannedStep(copy.deepcopy(module), slow, each.schedule, each.lanes), batch)
            expected = results(PlannedStep(copy.deepcopy(module), step, plan.schedule), batch)
            assert all(map(torch.equal, expected, found))
    assert "rematplan recovery" not in [t.name for t in threading.enumerate()]


def test_dropout_is_replayed_and_batch_norm_updated_once(cache: Path) -> None:
    module, batch, step, graph, plan = made(5, cache, ordinary=True)
    laned = on_two_lanes(graph, plan, 2**40)
    runs = [s.op for s in plan.schedule if hasattr(s, "op")]
    assert any(runs.count(name) > 1 for name in graph.ordered)
    assert "with draws:" in PlannedStep(module, step, laned.schedule, laned.lanes).source
    outcome = verify(PlannedStep(module, step, laned.schedule, laned.lanes), batch, 3)
    assert outcome.bit_equal, outcome.differences


def test_the_promised_peak_holds(cache: Path) -> None:
    module, batch, step, graph, plan = made(5, cache)
    resident = (
        graph.input_bytes - graph.fixed_split.get("rng_states", 0) - graph.fixed_split.get("tangent", 0)
    )
    peaks = []
    for more in (0, 2**13, 2**15, 2**40):
        laned = on_two_lanes(graph, plan, plan.estimate.peak + more)
        assert laned.lanes.peak <= plan.estimate.peak + more
        for timing in range(2):
            slow = slowed(step, Random(timing)) if timing else step
            planned = PlannedStep(module, slow, laned.schedule, laned.lanes)
            with untouched(module):
                run_once(planned, batch)
                module.zero_grad()
                above, _ = peak_above_entry(lambda planned=planned: run_once(planned, batch), CPU)
            peaks.append(above)
            assert resident + above <= laned.lanes.peak
    assert len(set(peaks)) > 2


class Broken(RuntimeError):
    """What a broken op raises."""


def before_run(step: CapturedStep, runs: list[str], at: int, what: Callable[[], Any]) -> CapturedStep:
    """The step with something to do before its run ``at``, the second time that a plan with these runs is executed.

    The first execution compares strides, on one lane.
    """
    count, name = itertools.count(1), runs[at]
    chosen = runs.count(name) + runs[: at + 1].count(name)

    def first() -> None:
        if next(count) == chosen:
            what()

    return wrapped(step, lambda call: first if call.name == name else None)


def breaking(step: CapturedStep, runs: list[str], at: int) -> CapturedStep:
    """The step, whose run ``at`` fails in the second execution."""

    def fail() -> None:
        raise Broken(runs[at])

    return before_run(step, runs, at, fail)


@pytest.mark.parametrize("ordinary", [False, True], ids=["inverted", "recomputed"])
def test_lanes_run_at_the_same_time(ordinary: bool, cache: Path) -> None:
    """The first ops of both lanes wait for each other, which lanes that took turns would do in vain."""
    module, batch, step, graph, plan = made(3, cache, ordinary)
    laned = on_two_lanes(graph, plan, 2**40)
    runs, recovery = runs_of(laned.schedule), laned.lanes.recovery
    first = next(at for at in range(runs.index(LOSS) + 1, len(runs)) if at not in recovery)
    meeting, met = threading.Barrier(2), list[int]()
    for at in (first, recovery[0]):
        step = before_run(step, runs, at, lambda: met.append(meeting.wait(60)))
    planned = PlannedStep(module, step, laned.schedule, laned.lanes)
    results(planned, batch)
    assert not met
    results(planned, batch)
    assert sorted(met) == [0, 1]


@pytest.mark.parametrize("ordinary", [False, True], ids=["inverted", "recomputed"])
def test_what_a_lane_raises_is_raised_and_nobody_hangs(ordinary: bool, cache: Path) -> None:
    module, batch, step, graph, plan = made(3, cache, ordinary)
    laned = on_two_lanes(graph, plan, 2**40)
    runs = [s.op for s in laned.schedule if hasattr(s, "op")]
    for at in range(runs.index(LOSS) + 1, len(runs)):
        run = PlannedStep(module, breaking(step, runs, at), laned.schedule, laned.lanes)
        results(run, batch)
        with pytest.raises(Broken, match=runs[at]):
            results(run, batch)
        assert "rematplan recovery" not in [t.name for t in threading.enumerate()]
    results(run, batch)  # and the next step runs


def test_an_interrupt_ends_both_lanes(cache: Path) -> None:
    module, batch, step, graph, plan = made(3, cache)
    laned = on_two_lanes(graph, plan, 2**40)
    runs = [s.op for s in laned.schedule if hasattr(s, "op")]
    last = next(name for name in reversed(runs) if graph.op[name].phase == "backward")

    def interrupt() -> None:
        raise KeyboardInterrupt

    tried = before_run(step, runs, runs.index(last), interrupt)
    planned = PlannedStep(module, tried, laned.schedule, laned.lanes)
    results(planned, batch)
    with pytest.raises(KeyboardInterrupt):
        results(planned, batch)
    assert "rematplan recovery" not in [t.name for t in threading.enumerate()]


def test_an_interrupt_of_the_last_wait_ends_both_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    main, recovery = two_lanes(CPU)
    join, interrupted = threading.Thread.join, list[bool]()

    def interrupt_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupt_once)
    with pytest.raises(KeyboardInterrupt), recovery.running(lambda: main.wait(1)):
        pass
    assert "rematplan recovery" not in [t.name for t in threading.enumerate()]


def test_lanes_that_do_not_wait_for_their_data_are_refused(cache: Path) -> None:
    module, _, step, graph, plan = made(3, cache)
    laned = on_two_lanes(graph, plan, 2**40)
    with pytest.raises(ProblemError, match="does not wait for a tensor that it reads"):
        PlannedStep(module, step, laned.schedule, replace(laned.lanes, waits=()))


class FakeStream:
    """A CUDA stream as far as lanes use one: what is asked of it is written down."""

    log: ClassVar[list[tuple[str, ...]]] = []
    now = threading.local()

    def __init__(self, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append((self.name, "waits for stream", other.name))

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, "waits for event", event))

    def record_event(self) -> str:
        self.log.append((self.name, "records"))
        return f"{self.name} {sum(entry == (self.name, 'records') for entry in self.log)}"


@contextmanager
def on_stream(stream: FakeStream) -> Iterator[None]:
    FakeStream.now.stream = stream
    yield
    del FakeStream.now.stream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, ...]]]:
    """Stand-ins for CUDA's streams; what is asked of them."""
    main_stream, log = FakeStream("main"), list[tuple[str, ...]]()
    monkeypatch.setattr(FakeStream, "log", log)
    recovery_stream.cache_clear()
    monkeypatch.setattr(lanes, "on_host", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    current = lambda device=None: getattr(FakeStream.now, "stream", main_stream)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: log.append((stream.name, "takes over"))
    )
    yield log
    recovery_stream.cache_clear()


def test_on_cuda_a_wait_is_one_of_streams_too(streams: list[tuple[str, ...]]) -> None:
    device = torch.device("cuda", 0)
    main, recovery = two_lanes(device)

    def recover() -> None:
        stream_recorder(device)(torch.zeros(1))
        recovery.reached(1)
        main.wait(2)

    with recovery.running(recover):
        recovery.wait(1)
        main.reached(2)
    assert streams == [
        ("side", "waits for stream", "main"),
        ("side", "takes over"),
        ("side", "records"),
        ("main", "waits for event", "side 1"),
        ("main", "records"),
        ("side", "waits for event", "main 1"),
        ("main", "waits for stream", "side"),
    ]


def test_what_is_on_the_host_is_recorded_on_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    stream_recorder(torch.device("cuda", 0))(torch.zeros(1))  # PyTorch records no tensor of the CPU


@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_on_cuda_what_changes_lanes_is_recorded_on_the_stream_that_takes_it(
    streams: list[tuple[str, ...]], cache: Path
) -> None:
    """The very source that CUDA would get, with real tensors of the CPU on streams that are stand-ins."""
    module, batch, step, graph, plan = made(5, cache, ordinary=True)
    laned = on_two_lanes(graph, plan, plan.estimate.peak)
    on_cuda = replace(step)
    on_cuda.__dict__["device"] = torch.device("cuda", 0)
    one, two = compile_halves(step, plan.schedule), compile_halves(on_cuda, laned.schedule, lanes=laned.lanes)
    inputs = bound(step, module, batch)
    found, expected = (in_two_halves(halves, step, inputs) for halves in (two, one))
    assert all(map(torch.equal, found, expected))
    lines = [line.strip() for line in two.source.splitlines()]
    assert sum(line.startswith("del h_") for line in lines) == sum(e[1] == "takes over" for e in streams) > 5
    waits = [line for line in lines if ".wait(" in line]
    own = split_at_loss(step, laned.schedule, laned.lanes).lanes
    assert len(waits) == len(own.waits) == sum(e[1] == "waits for event" for e in streams) > 5
    assert streams[0] == ("side", "waits for stream", "main")
    assert streams[-1] == ("main", "waits for stream", "side")


def in_two_halves(halves: Halves, step: CapturedStep, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All results of a compiled step, without autograd around it."""
    torch.manual_seed(11)
    kinds = {i.value: i.kind for i in step.inputs}
    with torch.no_grad():
        results, held = halves.forward(*(t.clone() for name, t in inputs.items() if kinds[name] != "tangent"))
        found, tangents = list(results), [t for name, t in inputs.items() if kinds[name] == "tangent"]
        for segment in halves.backward:
            results, held = segment.function(held, *tangents)
            found, tangents = [*found, *results], []
    return found


def test_both_lanes_compute_with_the_number_of_threads_that_was_set() -> None:
    code = """
        import torch
        from rematplan.runtime.costs.measure import peak_above_entry
        from rematplan.runtime.execute.lanes import two_lanes
        torch.set_num_threads(1)
        cpu, x, weight = torch.device("cpu"), torch.randn(3, 8, 5, 5), torch.randn(8, 8, 2, 2)
        run = lambda: peaks.append(peak_above_entry(lambda: torch.conv_transpose2d(x, weight, stride=2), cpu)[0])
        peaks = []
        with two_lanes(cpu)[1].running(run):
            pass
        run()
        print(*peaks)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    told = subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "8"}, text=True)
    recovery, main = map(int, told.split())
    assert recovery == main > 0


def test_a_lane_that_waits_for_a_failed_one_gets_the_failure() -> None:
    def recover(fail: Callable[[], None], main: Lane) -> None:
        fail()
        main.wait(9)

    main, recovery = two_lanes(CPU)
    with pytest.raises(ZeroDivisionError), recovery.running(lambda: recover(lambda: 1 // 0, main)):
        recovery.wait(5)
    main, recovery = two_lanes(CPU)
    with pytest.raises(KeyError), recovery.running(lambda: recover(lambda: None, main)):
        raise KeyError
    assert "rematplan recovery" not in [t.name for t in threading.enumerate()]
