"""`rematplan plan` and `curve` for a range of sizes of an ONNX file."""

import csv
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from rematplan.cli import main
from rematplan.planner.family.range_proof import RangeProof
from rematplan.plans.size_ranges import show_sizes

SIZES = list(range(1, 15))


@pytest.fixture(scope="module")
def chain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chain of layers with a symbolic batch."""
    path = tmp_path_factory.mktemp("onnx") / "chain.onnx"
    assert main(["export", "chain", "--dim", "depth=6", "--dim", "width=8", "--quiet", "-o", str(path)]) == 0
    return path


@pytest.fixture
def ranged(call, chain_file):
    def run(command, *more):
        return call(command, chain_file, "--dim", "batch=1..14", "--costs", "a100", *more)

    return run


def test_a_family_serves_all_sizes_and_says_how(ranged, call, chain_file) -> None:
    result = ranged("plan", "--budget", "80% of activations", "--json")
    assert result.status == 0, result.err
    (found,) = result.data["ranges"]
    assert [row["size"] for row in found["table"]] == SIZES
    assert found["unfit"] == []
    assert all(row["fits"] and row["peak"] <= found["budget"] for row in found["table"])
    assert found["budget"] < found["table"][-1]["no_recompute_peak"]
    assert found["table"][-1]["overhead"] > 0 == found["table"][0]["overhead"]
    computed = [row for row in found["table"] if not row["captured"]]
    assert len(computed) >= 5
    for row in (computed[0], computed[-1]):
        one = ("plan", chain_file, "--dim", f"batch={row['size']}", "--costs", "a100", "--budget", "100%")
        assert (
            call(*one, "--strategy", "store_all", "--json").data["no_recompute_peak"]
            == row["no_recompute_peak"]
        )


def test_sizes_that_do_not_fit_are_named_and_the_table_is_shown(ranged) -> None:
    result = ranged("plan", "--budget", "5KiB")
    assert result.status == 3
    assert "no plan is known within 5.00 KiB at batch = " in result.err
    assert "..14 (" in result.err
    assert result.err.count("\n") == 1
    assert "batch" in result.out
    assert "captured" in result.out


def test_the_curve_of_a_range_is_drawn(ranged, tmp_path) -> None:
    png, table = tmp_path / "range.png", tmp_path / "range.csv"
    result = ranged("curve", "--budget", "90%", "--budget", "60%", "--png", png, "--csv", table, "--json")
    assert result.status == 0, result.err
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [int(row["size"]) for row in rows] == 2 * SIZES
    for row, said in zip(rows, [r for one in result.data["ranges"] for r in one["table"]], strict=True):
        assert int(row["predicted_peak_bytes"]) == said["peak"]
        assert bool(int(row["fits"])) is said["fits"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("plan", "--budget", "1GB", "--dim", "height=1..3"), "one dimension may have a range"),
        (("plan", "--budget", "1GB", "-o", "plan.json"), "--output: a file is for one size"),
        (("plan", "--budget", "1GB", "--strategy", "chen_sqrt"), "chen_sqrt plans one size"),
        (("plan", "--budget", "1GB", "-S", "two_lanes=on"), "two_lanes goes with one size"),
        (("curve", "--measure"), "--measure goes with one size"),
        (("curve", "--strategy", "chen_sqrt"), "planned by auto alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_go_with_a_range(ranged, refused, argv, why, monkeypatch) -> None:
    monkeypatch.setattr("rematplan.cli.size_range.load", None)  # nothing is captured for a refusal
    result = ranged(*argv)
    refused(result, 2)
    assert why in result.err


@pytest.mark.parametrize(
    "text",
    [
        "batch=5..5",
        "batch=9..1",
        "batch=1..9999",
        "batch=0..3",
        "batch=1..x",
        "..=1",
        "batch=2..9..3",
        "b=1..2..1..1",
    ],
)
def test_a_malformed_range_is_refused(call, refused, chain_file, text) -> None:
    refused(call("plan", chain_file, "--dim", text, "--budget", "1GB"), 2)


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that puts the rows of its input together in pairs."""
    path = tmp_path_factory.mktemp("onnx") / "pairs.onnx"
    sizes = {"x": ("batch", 8), "y": ("half", 16)}
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in sizes.items())
    weight = numpy_helper.from_array(np.full((16, 16), 0.1, dtype=np.float32), "w")
    shape = numpy_helper.from_array(np.array([-1, 16]), "shape")
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["pairs"]),
        helper.make_node("MatMul", ["pairs", "w"], ["z"]),
        helper.make_node("Tanh", ["z"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "pairs", [x], [y], [weight, shape])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_sizes_that_must_be_multiples_have_a_range_with_a_distance(call, refused, pairs_file) -> None:
    options = ("--budget", "1GB", "--costs", "a100", "--json")
    result = call("plan", pairs_file, "--dim", "batch=2..32..2", *options)
    assert result.status == 0, result.err
    table = result.data["ranges"][0]["table"]
    assert [row["size"] for row in table] == list(range(2, 33, 2))
    assert any(not row["captured"] for row in table)
    result = call("plan", pairs_file, "--dim", "batch=2..9", *options[:-1])
    refused(result, 2)
    assert "--dim batch=3: " in result.err


def test_commands_for_one_size_refuse_a_range(call, refused, chain_file) -> None:
    refused(call("step", chain_file, "--dim", "batch=1..4", "--budget", "1GB"), 2)


def test_a_problem_file_has_no_dimension(call, refused, problem) -> None:
    refused(call("plan", problem, "--dim", "batch=1..4", "--budget", "1GB"), 2)


def test_sizes_are_shown_as_ranges() -> None:
    assert show_sizes([1, 3, 4, 5, 9]) == "1, 3..5, 9"
    assert show_sizes([]) == ""
    assert RangeProof(1, ()).holds
