"""K-FAC on several gloo processes equals K-FAC on one process with the whole batch."""

import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_scripts

from rematplan.ir import UsageError
from rematplan.optim.distributed import Ranks

FOLDER = Path(__file__).parent


def commands(size: int, folder: Path, *checks: str) -> list[list[str]]:
    """The command of each process that makes these checks, without the interpreter."""
    script, rendezvous = str(FOLDER / "distributed_worker.py"), str(folder / "rendezvous")
    return [[script, str(rank), str(size), rendezvous, *checks] for rank in range(size)]


def interpreted(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("size", "checks"),
    [
        (
            2,
            [
                "own_reduction",
                "unequal",
                "data_parallel",
                "planned",
                "early",
                "sharded",
                "planned_and_sharded",
                "other_size",
                "counted",
                "bounded",
            ],
        ),
        (4, ["unequal", "two_workers", "all_workers", "counted"]),
    ],
)
def test_steps_are_those_of_one_process(size: int, checks: list[str], tmp_path: Path) -> None:
    ranks = run_scripts(commands(size, tmp_path, *checks), tmp_path)
    for one in ranks:
        assert one.status == 0, one.err
    assert ranks[0].out.splitlines() == [f"{check}: equal" for check in checks]


def test_a_process_that_fails_ends_all(tmp_path: Path) -> None:
    """Where the interpreter ends by itself, as a program's does."""
    processes = [interpreted(command) for command in commands(2, tmp_path, "failing")]
    try:
        first, last = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode != 0 for process in processes)
    # PyTorch's threads may print another line when the process ends.
    assert "ValueError: the last process fails\n" in last
    said = "ProcessEnded: rank 0 of 2: another process has ended or cannot be reached ("
    assert any(said in line for line in first.splitlines()[-2:])


def test_without_a_process_group_it_is_refused() -> None:
    with pytest.raises(UsageError, match="torchrun"):
        Ranks()
