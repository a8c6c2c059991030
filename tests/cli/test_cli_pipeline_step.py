"""The command pipeline-step: a planned pipeline under torchrun, compared with a single process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rematplan.cli import main

ROOT = Path(__file__).parent.parent.parent
SIZES = (
    *("vit_s", "--dim", "depth=2", "--dim", "width=16", "--dim", "image=32", "--dim", "classes=5"),
    *("--dim", "batch=2"),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "pipe.json"
    more = ("--stages", "2", "--microbatches", "3", "--budget", "1GiB", "-S", "time_limit=0.1")
    assert main(["pipeline", *SIZES, *more, "--quiet", "-o", str(path)]) == 0
    return path


def ranks_of(file: Path, processes: int) -> list[dict]:
    """What the ranks of a pipeline report."""
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--standalone",
        "--no-python",
    ]
    program = [sys.executable, "-m", "rematplan", "pipeline-step", str(file), "--verify", "--json"]
    done = subprocess.run(
        [sys.executable, *command, *program, "-S", "time_limit=0.1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["ranks"]


def check(ranks: list[dict]) -> None:
    assert all(one["different"] == [] for one in ranks)
    assert all(one["compared"] > 0 for one in ranks)  # where the cut is depends on the search
    assert sum(one["compared"] for one in ranks) > 20
    assert [len(one["losses"]) for one in ranks] == [0] * (len(ranks) - 1) + [3]
    assert all(0.9 * one["promised"] <= one["measured"] <= one["promised"] for one in ranks)


def test_gradients_equal_those_of_a_single_process_and_peaks_hold(file) -> None:
    check(ranks_of(file, 2))


def test_without_torchrun_the_message_states_the_command(call, file, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = call("pipeline-step", file)
    assert done.status == 2
    assert f"torchrun --nproc-per-node 2 -m rematplan pipeline-step {file}" in done.err


def test_another_number_of_processes_is_refused(call, file, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    done = call("pipeline-step", file)
    assert done.status == 2
    assert "torchrun started 3 processes, but the ranks of" in done.err


def test_a_missing_file_is_refused(call, tmp_path) -> None:
    done = call("pipeline-step", tmp_path / "none.json")
    assert done.status == 2
    assert "cannot be read" in done.err
