"""Processes that begin with PyTorch and rematplan loaded. To load both takes 7 seconds of CPU time, so one server of
each test process loads them once, and each further process is a fork of it.

The forks of a server order sets of strings alike. Where that order may matter, start interpreters instead.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from captured_once import captured_once
from torch import distributed

CONTEXT = multiprocessing.get_context("forkserver")
LOADED = (
    "pytest",
    "rematplan.pipeline.plan_pipeline",
    "rematplan.pipeline.run_step",
    "rematplan.plan_any_module",
    "torch.distributed.fsdp",
)
CONTEXT.set_forkserver_preload(list(LOADED))
PATIENCE = 240.0
"""Seconds that scripts may take on a crowded machine."""


class Done(NamedTuple):
    """How a script ended: its exit status (negative: the signal that ended it) and what it printed."""

    status: int | None
    out: str
    err: str


def run_scripts(commands: Sequence[Sequence[str | Path]], folder: Path) -> list[Done]:
    """Run Python scripts at the same time, each in a process of its own, and wait for all of them.

    ``commands``: a script and its arguments each. ``folder``: where they run. A script that takes too long is killed.
    """
    logs = [[folder / f"{name}{at}.log" for name in ("out", "err")] for at in range(len(commands))]
    processes = [
        CONTEXT.Process(target=_script, args=([*map(str, command)], folder, *paths))
        for command, paths in zip(commands, logs, strict=True)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
        process.join()
    return [
        Done(process.exitcode, *(path.read_text() for path in paths))
        for process, paths in zip(processes, logs, strict=True)
    ]


def begin() -> None:
    """Settings of a fork: one torch thread, since others run beside it; and Python's collector of cycles leaves alone
    what was loaded, and comes seldom, as in `conftest`: with Python's settings it takes a third of a fork's time."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


@contextmanager
def gloo_rank(rank: int, world: int, rendezvous: str) -> Iterator[None]:
    """What a script of `run_scripts` does as one rank of a process group, after which its process ends."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    yield
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of Gloo that frees a tensor while Python shuts down would abort the process


def _script(command: list[str], folder: Path, out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(folder)
    begin()
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    with captured_once():
        runpy.run_path(command[0], run_name="__main__")
