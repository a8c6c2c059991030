"""K-FAC on several gloo processes equals K-FAC on one process with the whole batch."""

import subprocess
import sys
from pathlib import Path

import pytest

from rematplan.ir import UsageError
from rematplan.optim.distributed import Ranks

FOLDER = Path(__file__).parent


def run(size: int, folder: Path, *checks: str) -> list[tuple[int, str, str]]:
    """Status, output and errors of each process that makes these checks."""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(FOLDER / "distributed_worker.py"),
                str(rank),
                str(size),
                str(folder / "rendezvous"),
                *checks,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=240) for process in ranks]
        return [(process.returncode, *texts) for process, texts in zip(ranks, said, strict=True)]
    finally:
        for process in ranks:
            process.kill()


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
        (4, ["unequal", "two_workers", "all_workers", "data_parallel", "sharded", "counted", "bounded"]),
    ],
)
def test_fifty_steps_are_those_of_one_process(size: int, checks: list[str], tmp_path: Path) -> None:
    for status, _, errors in (ranks := run(size, tmp_path, *checks)):
        assert status == 0, errors
    assert ranks[0][1].splitlines() == [f"{check}: equal" for check in checks]


def test_a_process_that_fails_ends_all(tmp_path: Path) -> None:
    first, last = run(2, tmp_path, "failing")
    assert last[0] != 0
    assert first[0] != 0
    # PyTorch's threads may print another line when the process ends.
    assert "ValueError: the last process fails\n" in last[2]
    said = "ProcessEnded: rank 0 of 2: another process has ended or cannot be reached ("
    assert any(said in line for line in first[2].splitlines()[-2:])


def test_without_a_process_group_it_is_refused() -> None:
    with pytest.raises(UsageError, match="torchrun"):
        Ranks()
