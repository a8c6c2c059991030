"""Help texts: every option states its meaning, and every strategy what it does."""

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from rematplan.cli.arguments import MEANINGS
from rematplan.cli.run_command import COMMANDS, parser
from rematplan.ir.cache_folder import cache_folder
from rematplan.planner.registry import STRATEGIES


def options(command: str) -> Iterator[argparse.Action]:
    root = parser([command])
    commands = next(a for a in root._actions if isinstance(a, argparse._SubParsersAction))
    yield from commands.choices[command]._actions


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_states_its_meaning(command: str) -> None:
    for option in options(command):
        assert option.help, option.option_strings
        assert not option.help.startswith(("auto: default", "default")), option.option_strings
        assert option.metavar != "X" or "speed" in option.help or "error" in option.help, (
            option.option_strings
        )


def test_each_option_of_a_strategy_has_a_meaning_and_a_unit(call) -> None:
    assert {f.name for kind in STRATEGIES.values() for f in fields(kind)} == MEANINGS.keys()
    said = " ".join(call("plan", "--help").out.split())
    for name, (unit, meaning) in MEANINGS.items():
        assert f" {name}={unit}" in said
        assert meaning in said
    assert "objective=time,memory " in said
    assert "reuse=on,off " in said


@pytest.mark.parametrize("command", ["plan", "curve", "step"])
def test_strategies_are_described(call, command: str) -> None:
    said = call(command, "--help").out
    for name, kind in STRATEGIES.items():
        assert f"{name} " in said
        assert kind.summary in said


def test_devices_lists_all_models_and_each_can_be_used(call) -> None:
    listed = call("info", "devices", "--json").data["devices"]
    assert [d["name"] for d in listed if d["default"]] == ["a100"]
    table = call("info", "devices").out
    for device in listed:
        assert device["name"] in table
        assert f"{device['gigabytes_a_second']:g}" in table
        assert (
            call(
                *("plan", "vgg19", "--dim", "width=2", "--dim", "image=32", "--costs"),
                device["name"],
                "--budget",
                "100%",
                "--strategy",
                "store_all",
                "--quiet",
            ).status
            == 0
        )


def test_warm_compiles_the_loops(call) -> None:
    said = call("info", "warm", "--json").data
    assert said["seconds"] >= 0
    folder = Path(said["folder"])
    assert folder.is_relative_to(cache_folder())
    assert any(folder.rglob("*.nbi"))
    assert str(folder) in call("info", "warm").out.replace("\n", "")
    assert not call("info", "warm", "--quiet").out


def test_cache_lists_and_clears(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "rematplan"
    (folder / "plans").mkdir(parents=True)
    kept = {
        folder / "plans" / "a.json": b"12345",
        folder / "profile-b.json": b"123",
        folder / "other.txt": b"1",
    }
    for path, text in kept.items():
        path.write_bytes(text)
    said = call("info", "cache", "--json").data
    assert said["plans"] == {"files": 1, "bytes": 5}
    assert said["costs"] == {"files": 1, "bytes": 3}
    assert f"folder{folder}" in "".join(call("info", "cache").out.split())
    assert all(path.exists() for path in kept)
    assert call("info", "cache", "--clear", "--json").data["deleted"]
    assert [path.name for path in kept if path.exists()] == ["other.txt"]
    assert call("info", "cache", "--clear", "--json").data["plans"] == {"files": 0, "bytes": 0}


def test_step_states_the_loss_it_added_and_the_baseline_of_its_time(call) -> None:
    small = (
        *("vgg19", "--dim", "batch=2", "--dim", "image=32", "--dim", "width=2", "--budget", "100%"),
        *("--strategy", "store_all"),
    )
    said = call("step", *small, "--steps", "1").out
    assert "the loss is cross_entropy" in said
    assert "choose another with --loss" in " ".join(said.split())
    assert "the overhead counts ops alone" in said
    assert "the loss is" not in call("step", *small, "--steps", "1", "--loss", "mse").out


@pytest.mark.usefixtures("few_blocks")
def test_step_predicts_the_errors_of_inverses(call) -> None:
    """With a ReLU in every coupling."""
    small = ("revnet38", "--dim", "batch=2", "--dim", "image=32", "--dim", "width=8")
    said = call(
        "step",
        *small,
        *("--inverses", "--verify", "--budget", "min", "--strategy", "reversible", "--steps", "1"),
    )
    text = " ".join(said.out.split())
    assert said.status == 0
    assert "gradients not bit-equal: predicted relative error" in text
    assert "differ from plain autograd, as predicted" in text
