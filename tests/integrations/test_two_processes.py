"""A budget under Lightning's DDP strategy, and where accelerate shards layers by FSDP2; over gloo between two
processes."""

import socket
from pathlib import Path

import pytest
from forks import run_scripts


@pytest.mark.parametrize(
    ("library", "worker"),
    [("pytorch_lightning", "lightning_worker.py"), ("accelerate", "accelerate_worker.py")],
)
def test_steps_are_those_without_a_budget(library: str, worker: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    script = Path(__file__).parent / worker
    for process in run_scripts([[script, str(rank), port] for rank in range(2)], tmp_path):
        assert process.status == 0, process.err
        assert process.out.splitlines()[-1] == "equal"
