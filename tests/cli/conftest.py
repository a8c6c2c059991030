"""A fixture that calls the command line, and files that many tests read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rematplan.cli import main

# A chain, whose few lower sets are searched at once; with dropout; activations outweigh its parameters.
VGG = ("vgg19", "--dim", "batch=64", "--dim", "image=32", "--dim", "width=2")


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Result]


def quick(argv: list[str]) -> list[str]:
    """The arguments with a tenth of a second's limit for the strategies that would search longer."""
    if not argv or argv[0] not in ("plan", "curve", "step") or "--help" in argv:
        return argv
    return [*argv, "-S", "time_limit=0.1"]


@pytest.fixture(scope="module", autouse=True)
def _once(one_load: None) -> None:
    """Of all files: commands are tested, not captures."""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*argv: object) -> Result:
        capsys.readouterr()
        status = main(quick([str(a) for a in argv]))
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planning problem of a small VGG-19."""
    path = tmp_path_factory.mktemp("problem") / "vgg19.json"
    assert (
        main(
            [
                "plan",
                *VGG,
                *("--costs", "t4", "--budget", "100%", "--quiet", "--strategy", "store_all"),
                *("--problem-out",),
                str(path),
            ]
        )
        == 0
    )
    return path


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ResNet-18 with a symbolic batch."""
    path = tmp_path_factory.mktemp("onnx") / "r18.onnx"
    assert (
        main(["export", "resnet18", "--dim", "image=64", "--dim", "width=4", "--quiet", "-o", str(path)]) == 0
    )
    return path


def assert_one_line_error(result: Result, status: int) -> None:
    assert result.status == status, result
    assert result.out == ""
    assert result.err.startswith("rematplan: ")
    assert result.err.endswith("\n")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err


@pytest.fixture
def refused() -> Callable[[Result, int], None]:
    return assert_one_line_error
