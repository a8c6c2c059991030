"""The report's figures are those of the plan, and its files are those that the viewers read."""

import json
import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import rematplan
from rematplan.cli import main
from rematplan.ir import Op, Tensor, TrainingGraph, save_problem, show_bytes
from rematplan.plan_report.memory_trace import allocations, chrome_trace, snapshot
from rematplan.plan_report.page import Subject, page
from rematplan.plan_report.replay import Replay, folded, held_at_peak, replay, run_again, time_by_op
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.core.lane_schedule import Laned, Sharing, needs_of, placed
from rematplan.planner.core.plan import Plan, load_plan_with_problem, plan_from_runs, save_plan
from rematplan.planner.core.schedule import Run, runs_of
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.overlap.makespan import times_on_lanes
from rematplan.planner.overlap.place_on_lanes import on_two_lanes

LAYERS = 4
HOSTILE = "</script><script>alert(1)</script><b>"


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    """A chain of equal layers whose activations the backward reads."""
    tensors = [Tensor("x", 1 << 20), Tensor("g0", 1 << 20)]
    forward, backward = [], []
    for k in range(LAYERS):
        tensors += [Tensor(f"a{k}", 1 << 20), Tensor(f"g{k + 1}", 1 << 20)]
        read = f"a{k - 1}" if k else "x"
        forward.append(Op(f"tanh_{k}", (read,), (f"a{k}",), 10.0, 4096, "forward"))
        above = (f"g{k + 1}",) if k < LAYERS - 1 else (f"g{LAYERS}",)
        backward.insert(0, Op(f"tanh_backward_{k}", (f"a{k}", *above), (f"g{k}",), 20.0, 0, "backward"))
    loss = Op("loss", (f"a{LAYERS - 1}",), (f"g{LAYERS}",), 1.0, 0, "backward")
    ops = (*forward, loss, *backward)
    return TrainingGraph(HOSTILE, tuple(tensors), ("x",), ("g0",), ops, fixed_split={"batch": 1 << 20})


@pytest.fixture(scope="module")
def plan(graph: TrainingGraph) -> Plan:
    runs = [op.name for op in graph.ops]
    at = runs.index("tanh_backward_1")
    found = plan_from_runs(graph, [*runs[:at], "tanh_0", "tanh_1", *runs[at:]], "by_hand")
    assert found.estimate.reruns == 2
    return found


@pytest.fixture(scope="module")
def modules(graph: TrainingGraph) -> dict[str, str]:
    return {op.name: f"layers.{op.name[-1]}" for op in graph.ops if op.name.startswith("tanh")}


@pytest.fixture(scope="module")
def found(graph: TrainingGraph, plan: Plan, modules: dict[str, str]) -> Replay:
    return replay(graph, plan, modules)


def test_the_bytes_at_each_run_are_the_simulators(graph: TrainingGraph, plan: Plan, found: Replay) -> None:
    simulated = resident_bytes(graph, plan.schedule)
    at_runs = [n for n, step in zip(simulated, plan.schedule, strict=True) if isinstance(step, Run)]
    assert found.totals() == at_runs
    assert max(found.totals()) == plan.estimate.peak
    assert found.runs[-1].start + found.runs[-1].cost == plan.estimate.cost


def test_a_captured_steps_bytes_are_the_simulators() -> None:
    loaded = rematplan.load_step("unet", sizes=rematplan.Sizes(batch=2, image=32, width=4), weightless=True)
    graph = rematplan.problem(loaded, "h100")
    peak = rematplan.no_recompute(graph).peak
    plan = rematplan.plan(graph, peak * 9 // 10, "approx_dp")
    assert max(replay(graph, plan, {}).totals()) == plan.estimate.peak < peak
    assert sum(n for n, _, _ in time_by_op(replay(graph, plan, {}), {}).values()) == len(
        [step for step in plan.schedule if isinstance(step, Run)]
    )


def test_equal_layers_are_folded(graph: TrainingGraph, found: Replay) -> None:
    root = run_again(graph, found)
    assert (root.runs, root.bytes, root.cost) == (2, 2 << 20, 20.0)
    [(name, times, layers)] = folded(root)
    assert (name, times) == ("layers", 1)
    [(name, times, first)] = folded(layers)
    assert (name, times, first.bytes, first.cost) == ("0 … 1", 2, 1 << 20, 20.0)


def test_the_tensors_at_the_peak_are_resident_there(graph: TrainingGraph, plan: Plan, found: Replay) -> None:
    held = held_at_peak(graph, plan, found)
    at = [step for step in plan.schedule[: plan.estimate.peak_at + 1] if isinstance(step, Run)]
    workspace = graph.op[at[-1].op].workspace
    assert sum(h.bytes for h in held) + graph.input_bytes + workspace == plan.estimate.peak
    assert all(h.advice for h in held)


def test_the_page_is_whole_and_safe(graph: TrainingGraph, plan: Plan, modules: dict[str, str]) -> None:
    pytest.importorskip("plotly")
    text = page(Subject(graph, plan, modules, curve=(rematplan.no_recompute(graph),)))
    body = text[text.index("<body>") :]
    assert HOSTILE not in text
    assert "alert(1)" in body
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?(?!data:|[\"'])", text)
    assert f"({plan.estimate.peak} bytes)" in body
    assert '0 … 1 ×2 <span class="f">1 op, 1.00 MiB each' in body
    assert body.count('class="plot"') == 3
    assert "prefers-color-scheme: dark" in text


def test_a_plan_on_two_lanes_shows_when_they_work(graph: TrainingGraph, plan: Plan) -> None:
    pytest.importorskip("plotly")
    marked = infer_phases(graph)
    laned = on_two_lanes(marked, plan, plan.peak)
    assert laned is not None
    assert laned.lanes is not None
    text = page(Subject(marked, laned))
    assert text.count('class="plot"') == 4
    assert f"At any speed, the lanes hold at most {show_bytes(laned.lanes.peak)}." in text
    runs = tuple(runs_of(laned.schedule))
    where = placed(laned.lanes.fork, laned.lanes.recovery, len(runs))
    needs = needs_of(where, laned.lanes.waits)
    *times, (_, end) = times_on_lanes(Laned(marked, runs, where), needs, Sharing(laned.lanes.speed))
    assert end == pytest.approx(laned.lanes.makespan)
    for lane in where.lanes:
        assert all(times[a][1] <= times[b][0] for a, b in pairwise(lane))
    assert all(times[run][0] >= times[awaited][1] for run, awaited in laned.lanes.waits)
    assert all(end - start >= marked.op[name].cost for name, (start, end) in zip(runs, times, strict=True))


def test_names_may_be_broken_where_a_person_would(graph: TrainingGraph, plan: Plan) -> None:
    pytest.importorskip("plotly")
    assert "tanh_<wbr>" in page(Subject(graph, plan))


def test_allocations_sum_to_the_resident_bytes(graph: TrainingGraph, plan: Plan, found: Replay) -> None:
    live, peak, open_ = 0, 0, dict[int, int]()
    for one in allocations(found):
        live += one.bytes
        peak = max(peak, live)
        if one.bytes > 0:
            assert one.address not in open_
            open_[one.address] = one.bytes
        else:
            assert open_.pop(one.address) == -one.bytes
    assert peak == plan.estimate.peak
    assert live == graph.input_bytes + graph.size["g0"] + graph.size["g1"] + graph.size["a0"]


def test_the_snapshot_is_one_that_pytorch_draws(found: Replay) -> None:
    from torch.cuda import _memory_viz

    data = pickle.loads(snapshot(found))
    assert data["segments"] == []
    assert {e["action"] for e in data["device_traces"][0]} == {"alloc", "free_requested", "free_completed"}
    assert "<script" in _memory_viz.trace_plot(data)


def test_the_trace_has_memory_events(plan: Plan, found: Replay) -> None:
    events = json.loads(chrome_trace(found))["traceEvents"]
    memory = [e["args"] for e in events if e["name"] == "[memory]"]
    assert max(e["Total Allocated"] for e in memory) == plan.estimate.peak
    assert all({"Bytes", "Addr", "Device Id"} <= e.keys() for e in memory)
    assert sum(e["dur"] for e in events if e["ph"] == "X") == plan.estimate.cost


def test_a_plan_file_is_reported_on_alone(
    tmp_path: Path, graph: TrainingGraph, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    problem, planned, page_ = (tmp_path / name for name in ("problem.json", "plan.json", "r.html"))
    save_problem(graph, problem)
    options = ["--budget", "90%", "--strategy", "approx_dp", "-o", str(planned)]
    assert main(["plan", str(problem), *options]) == 0
    assert main(["report", str(planned), "-o", str(page_)]) == 0
    made, read = load_plan_with_problem(planned)
    assert read == graph
    assert f"({made.peak} bytes)" in page_.read_text()
    capsys.readouterr()
    assert main(["report", str(planned), "--budget", "1GB", "-o", str(page_)]) == 2
    assert "state neither --budget nor --plan" in capsys.readouterr().err
    save_plan(made, planned)
    assert main(["report", str(planned), "-o", str(page_)]) == 2
    assert "has no planning problem" in capsys.readouterr().err


def test_a_planned_module_writes_its_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    x = torch.randn(16, 32)
    planned = rematplan.plan_module(
        nn.Sequential(*layers), (x,), budget="100%", strategy="store_all", costs="roofline"
    )
    page_ = planned.report(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == page_.html
    assert f"({planned.plan.peak} bytes)" in page_.html
    assert page_._repr_html_().startswith("<iframe srcdoc=")


def test_the_command_writes_its_files(
    tmp_path: Path, graph: TrainingGraph, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    problem, planned = tmp_path / "problem.json", tmp_path / "plan.json"
    save_problem(graph, problem)
    save_plan(plan, planned)
    files = [tmp_path / name for name in ("r.html", "s.pickle", "t.json")]
    stated = ["-o", str(files[0]), "--snapshot", str(files[1]), "--trace", str(files[2])]
    assert main(["report", str(problem), "--plan", str(planned), *stated, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] == plan.estimate.peak
    assert all(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "state a file to write"),
        (["-o", "r.html"], "state a --budget or a --plan file"),
        (["-o", "r.html", "--budget", "1GB", "--plan", "p.json"], "state a --budget or a --plan file"),
        (["-o", "missing/r.html", "--budget", "1GB"], "does not exist"),
        (["-o", "r.html", "--snapshot", "r.html", "--budget", "1GB"], "same path"),
        (["-o", "r.html", "--snapshot", "s", "--trace", "s", "--budget", "1GB"], "same path, s;"),
    ],
)
def test_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "unet", *arguments]) == 2
    assert words in capsys.readouterr().err
