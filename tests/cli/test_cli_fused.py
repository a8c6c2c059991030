"""Commands with fused kernels."""

from __future__ import annotations

import pytest
from cpp_compiler import NEEDS_COMPILER

from rematplan.cli import main

pytestmark = NEEDS_COMPILER
SMALL = [f"--dim={size}" for size in ("batch=1", "tokens=16", "depth=1", "width=16", "vocabulary=32")]


def test_the_command_step_verifies_a_fused_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--budget", "100%", "--costs", "roofline", "--strategy", "store_all", "--kernels", "fused"]
    assert main(["step", "gpt12", *SMALL, *asked, "--steps", "1", "--verify"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tensors differ from plain autograd, as predicted" in said
    assert "gpt12 (fused)" in said


def test_the_command_curve_of_fused_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--costs", "roofline", "--strategy", "chen_sqrt", "--budget", "100%", "--kernels", "fused"]
    assert main(["curve", "gpt12", *SMALL, *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "gpt12 (fused): memory against time" in said
    assert "fused kernels, whose results differ" in said


def test_commands_refuse_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt12", *SMALL, "--budget", "90%", "--kernels", "fast"]) == 2
    assert "unknown kernels 'fast'; known: eager, fused" in capsys.readouterr().err
    assert main(["curve", "gpt12", "--dim=batch=1..2", "--kernels", "fused"]) == 2
    assert "--kernels needs a model at one size" in capsys.readouterr().err
