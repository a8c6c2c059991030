"""benchmarks/gpu.py without a GPU: its files are complete whenever it ends, and state what is missing."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., object]:
    """Runs the script in an empty folder, with arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("gc.collect", int)  # of all that other tests have loaded: a second for each network

    def with_arguments(*arguments: str) -> object:
        monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
        return runpy.run_path(str(SCRIPT), run_name="__main__")

    return with_arguments


def test_what_there_is_no_time_for_is_named(run: Callable[..., object]) -> None:
    run("--device", "cpu", "--small", "--minutes", "0", "--json", "of.json", "--table", "of.md")
    rows = json.loads(Path("of.json").read_text())["rows"]
    assert {row["network"] for row in rows} == {"resnet50", "gpt", "unet", "llama"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert len(rows) == 4 * 2 * (7 + 2)
    assert all(row["note"] for row in rows)
    assert Path("of.md").read_text().count("left out: no time") == len(rows)


def test_a_missing_device_is_said(run: Callable[..., object], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu.py: no CUDA device is here")
    assert not Path("gpu.json").exists()
