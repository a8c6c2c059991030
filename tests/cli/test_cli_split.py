"""The option ``--split``, for an ONNX file too: the peak falls, and the step is verified within rounding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rematplan.cli import curve

SIZES = {"depth": 1, "width": 16, "tokens": 32, "batch": 4, "vocabulary": 2000}
QUICK = ("--costs", "roofline", "-S", "moves=2000")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rematplan.cli import main

    path = tmp_path_factory.mktemp("split") / "gpt.onnx"
    sizes = [text for name, n in SIZES.items() for text in ("--dim", f"{name}={n}")]
    assert main(["export", "gpt12", *sizes, "-o", str(path)]) == 0
    return path


def peak(said: Any) -> int:
    assert said.status == 0, said.err
    return int(json.loads(said.out)["peak"])


def test_modules_have_the_names_of_the_users_own_model(file: Path, call: Callable[..., Any]) -> None:
    asked = ("plan", file, "--dim", "batch=4", "--budget", "least", *QUICK, "--json", "--split")
    assert peak(call(*asked, "blocks.0=4")) == peak(call(*asked, "model.blocks.0=4"))


def test_an_onnx_file_is_split(file: Path, call: Callable[..., Any]) -> None:
    asked = ("plan", file, "--dim", "batch=4", "--budget", "least", *QUICK, "--json")
    assert peak(call(*asked, "--split", "loss=4")) < 0.7 * peak(call(*asked))
    step = call("step", *asked[1:-1], "--split", "loss=4", "--verify", "--steps", "1")
    assert step.status == 0
    assert "as predicted" in " ".join(step.out.split())


def test_a_curve_is_of_the_split_step_in_percent_of_the_whole_one(
    file: Path, call: Callable[..., Any]
) -> None:
    asked = ("curve", file, "--dim", "batch=4", "--strategy", "approx_dp", "--budget", "60%", "--json")
    asked += ("--costs", "roofline")
    whole = json.loads(call(*asked).out)
    for what in ("loss=4", "auto"):
        split = json.loads(call(*asked, "--split", what).out)
        assert split["no_recompute_peak"] == whole["no_recompute_peak"]
        assert "split" in split["notes"][-1]
        assert split["table"][0]["overhead"] < (whole["table"][0]["overhead"] or 1)
        assert split["smallest_peak"] < whole["smallest_peak"]


def test_a_curve_of_a_problem_file_or_a_range_cannot_be_split(
    file: Path, problem: Path, call: Callable[..., Any]
) -> None:
    for asked in ((problem,), (file, "--dim", "batch=2..4")):
        said = call("curve", *asked, "--split", "auto")
        assert said.status == 2
        assert said.err.strip().endswith("--split needs a model at one size")


def test_a_curve_of_a_split_step_has_its_inverses_as_a_plan_has(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, trace = [], curve.trace
    monkeypatch.setattr(curve, "trace", lambda source, *more: traced.append(source) or trace(source, *more))
    sizes = [
        text for name, n in {"image": 32, "width": 4, "batch": 4}.items() for text in ("--dim", f"{name}={n}")
    ]
    asked = (
        "--split",
        "model.down.0=2",
        "--strategy",
        "store_all",
        "--budget",
        "100%",
        "--costs",
        "roofline",
    )
    assert call("curve", "unet", *sizes, *asked).status == 0
    assert traced[0].graph.inverses
