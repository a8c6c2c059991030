"""The command kfac: the model of an iteration."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rematplan.cli import main
from rematplan.optim.iteration_model import Link

MODEL = ["kfac", "chain", "--dim", "depth=4", "--dim", "width=64", "--dim", "batch=32"]


def document(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*MODEL, "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def by_ranks(found: dict[str, Any], optimizer: str) -> dict[int, dict[str, Any]]:
    return {one["ranks"]: one for one in found["iterations"] if one["optimizer"] == optimizer}


def test_parts_add_up_and_both_optimizers_share_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--ranks", "1..6")
    assert found["kind"] == "model, not measured"
    sgd, kfac = (by_ranks(found, name) for name in ("sgd", "kfac"))
    assert list(sgd) == list(kfac) == [1, 2, 4, 6]
    for ranks in sgd:
        for one in (sgd[ranks], kfac[ranks]):
            assert one["microseconds"] == pytest.approx(sum(one["parts"].values()))
        for part in ("forward", "backward", "normalisation", "gradient communication"):
            assert sgd[ranks]["parts"][part] == kfac[ranks]["parts"][part]
        assert sgd[ranks]["parts"]["factors"] == 0 < kfac[ranks]["parts"]["factors"]


def test_with_more_devices_each_inverts_and_holds_less(capsys: pytest.CaptureFixture[str]) -> None:
    kfac = by_ranks(document(capsys, "--ranks", "1,2,5"), "kfac")
    inverses = [one["parts"]["inverses"] for one in kfac.values()]
    states = [one["state_bytes"] for one in kfac.values()]
    assert inverses == sorted(inverses, reverse=True)
    assert len(set(inverses)) == 3
    assert states == sorted(states, reverse=True)


def test_communication_follows_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--ranks", "8", "--link", "2GB/s,7us")
    (kfac,), (sgd,) = (by_ranks(found, name).values() for name in ("kfac", "sgd"))
    # The optimizer of SGD holds one number a weight, as many as gradients have.
    gradients = 2 * (3 * 7 + 7 / 8 * sgd["state_bytes"] / 2e3)
    assert sgd["parts"]["gradient communication"] == pytest.approx(gradients)
    assert kfac["parts"]["factor communication"] > 3 * 7


def test_intervals_divide_the_times_of_statistics_and_inverses(capsys: pytest.CaptureFixture[str]) -> None:
    one = by_ranks(document(capsys, "--ranks", "2"), "kfac")[2]["parts"]
    seldom = by_ranks(document(capsys, "--ranks", "2", "--every", "4", "--inverse-every", "5"), "kfac")[2][
        "parts"
    ]
    for part, times in (("factors", 4), ("factor communication", 4), ("inverses", 5), ("update", 1)):
        assert one[part] == pytest.approx(times * seldom[part])


def test_one_process_sends_nothing() -> None:
    assert Link(25, 5).half(1e9, 1) == 0
    assert Link(25, 5).half(1e9, 1000) == pytest.approx(10 * 5 + 0.999 * 1e9 / 25e3)
    assert math.isclose(Link(25, 5).half(0, 8), 15)


def test_a_table_and_a_picture_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "breakdown.png"
    assert main([*MODEL, "--ranks", "1..4", "--png", str(png)]) == 0
    said = capsys.readouterr().out
    assert "model, not measured" in said
    assert "K-FAC" in said
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "8..2"], "'8..2' is not of the form 1..2048"),
        (["--ranks", "0"], "'0' is not a whole number"),
        (["--link", "25GB,5us"], "'25GB,5us' is not of the form 25GB/s,5us"),
        (["--link", "0GB/s,5us"], "not of the form"),
        (["--costs", "abacus"], "unknown device model 'abacus'"),
    ],
)
def test_malformed_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, *options]) == 2
    assert message in capsys.readouterr().err
