"""The commands models, export, curve, step and demo: their output and their files."""

import csv
import dataclasses
import struct

import onnx
import pytest

from rematplan import api
from rematplan.cli import demo
from rematplan.ir import load_problem
from rematplan.models import ZOO
from rematplan.module.verification import Difference, Verification
from rematplan.planner.registry import STRATEGIES

SMALL = ("unet", "--dim", "batch=2", "--dim", "image=32", "--dim", "width=4")


def test_models_lists_the_zoo(call, monkeypatch) -> None:
    listed = call("info", "models", "--json").data["models"]
    assert [m["name"] for m in listed] == list(ZOO)
    assert {m["name"]: m["parameters"] for m in listed}["resnet50"] == 25_557_032
    few = ("unet", "resnet18", "gpt12")
    monkeypatch.setattr("rematplan.models.ZOO", {name: ZOO[name] for name in few})
    table = call("info", "models").out
    assert all(name in table for name in few)
    assert call("info", "models", "--quiet").out == ""


def test_export_writes_a_file_and_states_its_input(call, tmp_path) -> None:
    path = tmp_path / "u.onnx"
    result = call("export", *SMALL, "-o", path, "--json")
    assert result.data["input"] == ["batch", 3, 32, 32]
    assert result.data["bytes"] == path.stat().st_size
    first = path.read_bytes()
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert "--dim batch=2" in call("export", *SMALL, "-o", path).out
    assert path.read_bytes() == first  # the same command writes the same network
    assert call("export", *SMALL, "-o", path, "--static-batch", "--json").data["input"] == [2, 3, 32, 32]
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


def test_curve_json_table_and_files(call, problem, tmp_path) -> None:
    png, points = tmp_path / "c.png", tmp_path / "c.csv"
    said = call("curve", problem, "--png", png, "--csv", points, "--json").data
    assert set(said["curves"]) == set(STRATEGIES) - {"reversible"}
    for curve in said["curves"].values():
        ordered = sorted(curve, key=lambda p: p["peak"])
        overheads = [p["overhead"] for p in ordered]
        assert overheads == sorted(overheads, reverse=True)
        assert len({p["peak"] for p in curve}) == len(curve)
    auto = {r["budget"]: r for r in said["table"] if r["strategy"] == "auto"}
    assert said["smallest_peak"] <= auto["min"]["peak"] <= 1.01 * said["smallest_peak"]
    for row in said["table"]:
        if row["strategy"] == "anneal":  # a search of its own, which may find better or worse
            continue
        best = auto[row["budget"]]
        assert row["peak"] is None or best["overhead"] <= row["overhead"] or row["budget"] == "min"
        if row["budget"].endswith("%") and row["peak"] is not None:
            assert row["peak"] <= float(row["budget"][:-1]) / 100 * said["no_recompute_peak"]
    rows = list(csv.DictReader(points.open()))
    assert len(rows) == sum(map(len, said["curves"].values()))
    assert {r["strategy"] for r in rows} == set(STRATEGIES) - {"reversible"}
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 900
    assert height > 500


def test_curve_table_for_a_person(call, problem) -> None:
    result = call("curve", problem, "--budget", "85%", "--budget", "min", "--strategy", "exact_dp")
    assert result.status == 0
    for words in (
        "recompute",
        "predicted",
        "overhead",
        "100.0 %",
        "store_all",
        "exact_dp",
        "85%",
        "min +1%",  # its peak may be larger than the smallest found
    ):
        assert words in result.out
    assert "chen_sqrt" not in result.out


def test_curve_and_plan_of_a_share_of_activations(call, problem) -> None:
    share = (problem, "--budget", "80% of activations", "--strategy", "exact_dp")
    planned = call("plan", *share, "--json").data
    (row,) = call("curve", *share, "--json").data["table"]
    graph = load_problem(problem)
    whole = sum(graph.size[t] for t in {*graph.inputs, *graph.outputs})
    assert planned["budget"] == whole + (planned["no_recompute_peak"] - whole) * 4 // 5
    assert planned["peak"] <= planned["budget"] < planned["no_recompute_peak"]
    assert row["budget"] == "80% of activations"
    assert row["peak"] == planned["peak"]


def test_curve_leaves_out_strategies_for_which_the_problem_is_too_large(call, refused, problem) -> None:
    limited = ("curve", problem, "-S", "max_lower_sets=3")
    said = call(*limited, "--json").data
    assert "exact_dp" not in said["curves"]
    assert "approx_dp" in said["curves"]
    assert any("lower sets" in note for note in said["notes"])
    refused(call(*limited, "--strategy", "exact_dp"), 2)


def test_curve_measures_plans(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rematplan.cli.curve.MEASURED_PLANS", 3)
    monkeypatch.setattr("rematplan.cli.curve.ROUNDS", 2)
    points, png = tmp_path / "c.csv", tmp_path / "c.png"
    strategies = ("--strategy", "store_all", "--strategy", "auto")
    budgets = ("--budget", "80%", "--budget", "min")
    said = call(
        "curve", *SMALL, *strategies, *budgets, "--measure", "--csv", points, "--png", png, "--json"
    ).data
    assert said["measured"][0]["strategy"] == "store_all"
    for one in said["measured"]:
        assert one["measured_peak"] == pytest.approx(one["peak"], rel=0.03)
        assert one["measured_peak"] <= one["peak"]
        assert one["seconds"] > 0
        assert one["eager_seconds"] > 0
    measured = [r for r in csv.DictReader(points.open()) if r["measured_peak_bytes"]]
    assert {int(r["measured_peak_bytes"]) for r in measured} == {m["measured_peak"] for m in said["measured"]}
    assert {"store_all", "auto"} <= {r["strategy"] for r in measured}
    assert png.read_bytes().startswith(b"\x89PNG")


CHAIN = ("chain", "--dim", "batch=64", "--dim", "depth=12", "--dim", "width=8")


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "output"])
def test_step_verifies_gradients(loss, call, onnx_file) -> None:
    model = (onnx_file, "--dim", "batch=8") if loss == "cross_entropy" else CHAIN
    result = call(
        *("step", *model, "--budget", "min", "--strategy", "chen_greedy"),
        *("--steps", "2", "--loss", loss, "--verify", "--json"),
    )
    assert result.status == 0, result.err
    said = result.data
    assert said["verification"]["bit_equal"]
    assert said["verification"]["differences"] == []
    assert said["verification"]["compared"] > (60 if loss == "cross_entropy" else 24)
    assert said["measured_peak"] <= said["budget"] < said["no_recompute_peak"]
    assert len(said["losses"]) == 2


def test_step_for_a_person(call) -> None:
    result = call("step", *SMALL, "--budget", "100%", "--verify", "--steps", "1")
    for words in ("predicted peak", "measured peak", "step time", "eager", "bit-equal", "parameters"):
        assert words in result.out
    assert result.err == ""
    assert call("step", *SMALL, "--budget", "100%", "--steps", "1", "--quiet").out == ""


def test_a_failed_verification_is_exit_status_1(call, monkeypatch) -> None:
    real = api.run_step

    def differing(*args: object, **more: object) -> api.StepReport:
        report = real(*args, **more)
        difference = Difference("gradient model.head.weight", 0.5, 0.1)
        return dataclasses.replace(report, verification=Verification(10, (difference,)))

    monkeypatch.setattr(api, "run_step", differing)
    result = call("step", *SMALL, "--budget", "100%", "--verify", "--steps", "1")
    assert result.status == 1
    assert "model.head.weight" in result.err


def test_a_difference_beyond_the_prediction_is_explained() -> None:
    difference = Difference("gradient model.head.weight", 0.5, 0.1)
    beyond = Verification(10, (difference,), predicted=6e-8)
    assert not beyond.passed
    assert "7.35e-03 was predicted" in str(beyond)
    assert "predicted" not in str(Verification(10, (difference,)))


def test_step_refuses_a_budget_below_the_smallest_peak(call, refused) -> None:
    result = call("step", *SMALL, "--budget", "10%", "--quiet")
    refused(result, 3)


@pytest.mark.usefixtures("few_blocks")
def test_demo_writes_files_and_verifies(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "TIME_LIMIT", 0.1)
    monkeypatch.setattr(demo, "DRAWN", ["store_all", "chen_sqrt", "auto"])
    monkeypatch.setattr("rematplan.cli.curve.BUDGETS", ("80%", "min"))
    result = call("demo", "--small", "--folder", tmp_path / "demo")
    assert result.status == 0, result.err
    assert result.out.count("bit-equal") == 2
    wanted = {f"{name}.{kind}" for name in ("unet", "resnet18") for kind in ("onnx", "png", "csv")}
    assert {p.name for p in (tmp_path / "demo").iterdir()} == wanted
