"""The command compare, and inverses on the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zoo_arguments import zoo_arguments

SMALL = zoo_arguments("revvit_s", image=64, width=32, batch=32, depth=4)
NAMES = ["store all", "√n checkpointing", "auto without inverses", "reversible", "auto with inverses"]
OVERLAP = "auto with inverses, overlap"


def test_compare_lists_all_strategies(call: Callable[..., Any], tmp_path: Path) -> None:
    png = tmp_path / "c.png"
    result = call("compare", *SMALL, "-S", "time_limit=0.1", "-S", "lane_speed=0.9", "--png", png, "--json")
    assert result.status == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = {r["strategy"]: r for r in result.data["strategies"]}
    assert list(rows) == [*NAMES, OVERLAP]
    assert rows["store all"]["extra_time"] == rows["store all"]["gradient_error"] == 0
    inverted = rows["reversible"]
    assert inverted["inversions"] > 0
    assert 0 < inverted["inversion_error"] < 1e-6
    assert 0 < inverted["gradient_error"] < 1e-4
    assert inverted["within_budget"]
    assert inverted["measured_peak"] <= 1.1 * inverted["peak"]
    assert inverted["measured_peak"] < 0.6 * rows["store all"]["measured_peak"]
    plain, both = rows["auto without inverses"], rows["auto with inverses"]
    assert both["within_budget"] >= plain["within_budget"]
    if plain["within_budget"]:
        assert both["extra_time"] <= plain["extra_time"]
    laned = rows[OVERLAP]
    assert laned["within_budget"] or not both["within_budget"]
    # A roofline has no workspaces, of which there are two at once.
    assert laned["measured_peak"] <= 1.2 * laned["peak"]
    assert laned["extra_time"] < both["extra_time"]
    assert laned["one_lane_seconds"] > 0
    assert both["one_lane_seconds"] is None
    assert all(r["passed"] for r in rows.values())


def test_compare_without_inverses(call: Callable[..., Any]) -> None:
    result = call(
        "compare", "vit_s", "--dim", "image=32", "--dim", "width=16", "--dim", "depth=2", "--costs", "roofline",
        "--no-run", "-S", "time_limit=0.2", "--json",
    )  # fmt: skip
    assert result.status == 0
    # What comes back by running again overlaps as well.
    names = [r["strategy"] for r in result.data["strategies"]]
    assert names == [*NAMES[:3], f"{NAMES[2]}, overlap"]
    assert all(r["gradient_error"] is None for r in result.data["strategies"])


def test_a_step_that_inverts_is_verified_within_its_error(call: Callable[..., Any]) -> None:
    result = call("step", *SMALL, "--strategy", "reversible", "--budget", "min", "--verify", "--json")
    assert result.status == 0
    said = result.data
    assert said["inversions"] > 0
    assert said["verification"]["passed"]
    assert not said["verification"]["bit_equal"]
    assert 0 < said["verification"]["error"] < 1e-4
    kept = call("step", *SMALL, "--strategy", "store_all", "--budget", "100%", "--verify", "--json").data
    assert kept["verification"]["bit_equal"]


def test_anchors_are_put_where_the_error_would_be_too_large(call: Callable[..., Any]) -> None:
    options = ("plan", *SMALL, "--strategy", "reversible", "--budget", "100%", "--json")
    graphs = [call(*options, *more).data for more in ((), ("--inverses=3e-8",))]
    assert graphs[1]["inversion_error"] <= 3e-8
    errors = [
        call(*options[:-3], "--budget", "min", "--json", *more).data for more in ((), ("--inverses=3e-8",))
    ]
    assert errors[0]["inversion_error"] > 3e-8 >= errors[1]["inversion_error"] > 0
    assert errors[1]["peak"] > errors[0]["peak"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("plan", "vit_s", "--dim", "image=32", "--dim", "width=16", "--dim", "depth=2", "--costs", "roofline",
          "--budget", "50%", "--strategy", "reversible"), "reversible: nothing in vit_s can be inverted"),
        (("plan", *SMALL, "--budget", "50%", "--inverses=0"), "'0' is not a number above zero"),
        (("plan", *SMALL, "--budget", "50%", "--inverses=x"), "'x' is not a number above zero"),
        (("compare", *SMALL, "--budget", "many"), "budget 'many' is not understood"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(call: Callable[..., Any], arguments: tuple[str, ...], line: str) -> None:
    result = call(*arguments)
    assert result.status == 2
    assert line in result.err
    assert len(result.err.strip().splitlines()) == 1
