"""Planned modules under DistributedDataParallel and FSDP2, over gloo between two processes."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def said_by_both(worker: str, rendezvous: Path) -> list[str]:
    """What two processes of a worker print."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(rank), str(rendezvous)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        for rank in range(2)
    ]
    said = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
            said.append(out)
    finally:
        for process in ranks:
            process.kill()
    return said


def test_twenty_steps_in_two_processes_have_equal_losses_and_weights(tmp_path: Path) -> None:
    for out in said_by_both("distributed_worker.py", tmp_path / "rendezvous"):
        assert out.splitlines() == ["data_parallel: equal", "sharded: equal", "sharded_units: equal"]


def test_ranks_that_get_other_plans_at_other_steps_have_the_weights_of_eager_mode(tmp_path: Path) -> None:
    said = said_by_both("refining_worker.py", tmp_path / "rendezvous")
    changes, plans, weights = zip(*(out.strip().split("|") for out in said), strict=True)
    assert changes[0] != changes[1]
    assert all(change.count(",") >= 3 for change in changes)
    assert all(int(count) >= 3 for count in plans)
    assert weights[0] == weights[1]
