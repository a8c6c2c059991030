"""A budget under Lightning's DDP strategy, over gloo between two processes."""

import socket
from pathlib import Path

import pytest
from forks import run_scripts

pytest.importorskip("pytorch_lightning")
WORKER = Path(__file__).parent / "lightning_worker.py"


def test_twenty_steps_in_two_processes_are_those_without_a_budget(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    for process in run_scripts([[WORKER, str(rank), port] for rank in range(2)], tmp_path):
        assert process.status == 0, process.err
        assert process.out.splitlines()[-1] == "equal"
