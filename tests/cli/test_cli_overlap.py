"""The option two_lanes: plans on two lanes are written, read and run."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from zoo_arguments import zoo_arguments

SMALL = zoo_arguments("revvit_s", image=64, width=32, batch=32, depth=4)
PLAN = (*SMALL, "--strategy", "reversible", "--budget", "70%")
LEAN = ("--strategy", "chen_sqrt", "--budget", "min")
RESNET = ("resnet18", "--dim", "image=32", "--dim", "width=4", "--dim", "batch=4", "--costs", "roofline")


def test_a_step_on_two_lanes_keeps_its_peak_and_its_bits(call: Callable[..., Any]) -> None:
    said = call("step", *RESNET, *LEAN, "-S", "two_lanes=on", "--verify", "--json")
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
    assert call("plan", *PLAN, "-S", "two_lanes=off", "--json").data["lanes"] is None
    slow = call("plan", *PLAN, "-S", "two_lanes=auto", "-S", "lane_speed=0.5", "--json").data
    assert slow["lanes"] is None
    assert any("two_lanes: two lanes would save no time" in note for note in slow["notes"])
    fast = call("plan", *PLAN, "-S", "two_lanes=auto", "-S", "lane_speed=1", "--json").data
    assert fast["lanes"]["saved"] > 0.02
    assert fast["lanes"]["peak"] <= fast["budget"]
    nothing = call(
        "plan", *SMALL, "--budget", "100%", "--strategy", "store_all", "-S", "two_lanes=on", "--json"
    ).data
    assert nothing["lanes"] is None
    assert any("recomputes nothing in the backward" in note for note in nothing["notes"])


def test_plan_files_contain_lanes_and_pass_the_checker(
    call: Callable[..., Any], checker: ModuleType, tmp_path: Path
) -> None:
    plan, problem = tmp_path / "plan.json", tmp_path / "problem.json"
    made = call(
        "plan", *RESNET, *LEAN, "-S", "two_lanes=on", "-o", plan, "--problem-out", problem, "--json"
    ).data  # fmt: skip
    assert checker.check_files(problem, plan)["peak"] == made["peak"]
    again = call("step", *RESNET, "--plan", plan, "--verify", "--json")
    assert again.status == 0
    assert again.data["lanes"] == made["lanes"]
    assert again.data["verification"]["bit_equal"]
    stated = call("step", *RESNET, "--plan", plan, "-S", "two_lanes=on", "-S", "lane_speed=0.9", "--json")
    assert stated.data["lanes"]["speed"] == 0.9
    one = call("step", *RESNET, "--plan", plan, "-S", "two_lanes=off", "--json").data
    assert one["lanes"] is None
    assert one["one_lane_seconds"] is None
    other = tmp_path / "other.json"
    from_file = ("plan", problem, "--strategy", "chen_sqrt", "--budget", str(made["budget"]))
    assert call(*from_file, "-S", "two_lanes=on", "-o", other, "--json").data["lanes"] == made["lanes"]
    assert other.read_text() == plan.read_text()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("-S", "two_lanes=maybe"), "two_lanes is 'maybe'; it must be one of off, auto, on"),
        (("-S", "lane_speed=0.4"), "lane_speed is 0.4; it must be from 0.5 to 1"),
        (("-S", "lane_speed=2"), "lane_speed is 2.0; it must be from 0.5 to 1"),
        (("-S", "lane_speed=x"), "lane_speed is 'x', not of type float"),
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
