"""The option --overlap: plans on two lanes are written, read and run."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SMALL = ("revvit_s", "--image", "64", "--width", "32", "--batch", "32", "--depth", "4", "--costs", "roofline")
PLAN = (*SMALL, "--strategy", "reversible", "--budget", "70%")
LEAN = ("--strategy", "chen_sqrt", "--budget", "min")
RESNET = ("resnet18", "--image", "32", "--width", "4", "--batch", "4", "--costs", "roofline")


def test_a_step_on_two_lanes_keeps_its_peak_and_its_bits(call: Callable[..., Any]) -> None:
    said = call("step", *RESNET, *LEAN, "--overlap", "on", "--verify", "--json")
    assert said.status == 0
    lanes = said.data["lanes"]
    assert said.data["verification"]["bit_equal"]
    assert said.data["peak"] <= lanes["peak"] <= said.data["budget"]
    assert lanes["recovery"] > 5
    assert lanes["waits"] > 0
    assert lanes["speed"] == 0.625
    assert lanes["makespan"] < said.data["cost"]
    assert said.data["one_lane_seconds"] > 0


def test_off_is_the_default_and_auto_overlaps_only_if_it_saves_time(call: Callable[..., Any]) -> None:
    plain = call("plan", *PLAN, "--json").data
    assert plain["lanes"] is None
    assert call("plan", *PLAN, "--overlap", "off", "--json").data["lanes"] is None
    slow = call("plan", *PLAN, "--overlap", "auto", "--lane-speed", "0.5", "--json").data
    assert slow["lanes"] is None
    assert any("overlap: two lanes would save no time" in note for note in slow["notes"])
    fast = call("plan", *PLAN, "--overlap", "auto", "--lane-speed", "1", "--json").data
    assert fast["lanes"]["saved"] > 0.02
    assert fast["lanes"]["peak"] <= fast["budget"]
    nothing = call(
        "plan", *SMALL, "--budget", "100%", "--strategy", "store_all", "--overlap", "on", "--json"
    ).data
    assert nothing["lanes"] is None
    assert any("recomputes nothing in the backward" in note for note in nothing["notes"])


def test_plan_files_contain_lanes_and_pass_the_checker(
    call: Callable[..., Any], checker: ModuleType, tmp_path: Path
) -> None:
    plan, problem = tmp_path / "plan.json", tmp_path / "problem.json"
    made = call(
        "plan", *RESNET, *LEAN, "--overlap", "on", "-o", plan, "--problem-out", problem, "--json"
    ).data  # fmt: skip
    assert checker.check_files(problem, plan)["peak"] == made["peak"]
    again = call("step", *RESNET, "--plan", plan, "--verify", "--json")
    assert again.status == 0
    assert again.data["lanes"] == made["lanes"]
    assert again.data["verification"]["bit_equal"]
    one = call("step", *RESNET, "--plan", plan, "--overlap", "off", "--json").data
    assert one["lanes"] is None
    assert one["one_lane_seconds"] is None
    other = tmp_path / "other.json"
    from_file = ("plan", "--problem", problem, "--strategy", "chen_sqrt", "--budget", str(made["budget"]))
    assert call(*from_file, "--overlap", "on", "-o", other, "--json").data["lanes"] == made["lanes"]
    assert other.read_text() == plan.read_text()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--overlap", "maybe"), "invalid choice: 'maybe'"),
        (("--lane-speed", "0.4"), "--lane-speed 0.4 is not between 0.5 and 1"),
        (("--lane-speed", "2"), "--lane-speed 2 is not between 0.5 and 1"),
        (("--lane-speed", "x"), "'x' is not a number above zero"),
    ],
)
@pytest.mark.parametrize(
    "command", [("plan", *PLAN), ("step", *PLAN), ("compare", *SMALL)], ids=lambda c: c[0]
)
def test_refusals_are_one_line(
    call: Callable[..., Any],
    refused: Callable[..., None],
    command: tuple[str, ...],
    options: tuple[str, str],
    line: str,
) -> None:
    result = call(*command, *options)
    refused(result, 2)
    assert line in result.err
