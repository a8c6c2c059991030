"""Planned modules under DistributedDataParallel and FSDP2, over gloo between two processes."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "distributed_worker.py"


@pytest.mark.parametrize("how", ["data_parallel", "sharded", "sharded_units"])
def test_twenty_steps_in_two_processes_have_equal_losses_and_weights(how: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), how, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
            assert out == "equal\n"
    finally:
        for process in ranks:
            process.kill()
