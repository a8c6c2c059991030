"""Planned modules under DistributedDataParallel and FSDP2, over gloo between two processes."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "distributed_worker.py"


def test_twenty_steps_in_two_processes_have_equal_losses_and_weights(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "rendezvous")],
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
            assert out.splitlines() == ["data_parallel: equal", "sharded: equal", "sharded_units: equal"]
    finally:
        for process in ranks:
            process.kill()
