"""Processes of a gloo group that run one function after another, each as a rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import gloo_rank
import pytest
from forks import CONTEXT

PATIENCE = 240.0
"""Seconds after which processes that give no answer are given up."""
LEFT = 30.0
"""Seconds that the others have once one has failed: they may wait for it for ever."""


class Workers:
    """Processes that run the same function, each as another rank. They are started anew after a failure."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder, self.started = count, folder, 0
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        """Start the processes, if they do not run."""
        if self.processes:
            return
        self.started += 1
        rendezvous = str(self.folder / f"rendezvous{self.started}")
        for rank in range(self.count):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=gloo_rank.serve, args=(rank, self.count, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def answers(self, function: Callable[..., Any], **more: Any) -> list[tuple[bool, Any]]:
        """Of each rank whether its call came to its end, and what it gives, or its error."""
        self.start()
        for pipe in self.pipes:
            pipe.send((function, more))
        found: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + PATIENCE
        while len(found) < self.count and time.monotonic() < until:
            missing = {self.pipes[rank]: rank for rank in range(self.count) if rank not in found}
            for pipe in wait(list(missing), timeout=max(0.0, until - time.monotonic())):
                rank = missing[pipe]
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    found[rank] = (False, "the process ended")
                if not found[rank][0]:
                    until = min(until, time.monotonic() + LEFT)
        found |= {rank: (False, "no answer") for rank in range(self.count) if rank not in found}
        if not all(good for good, _ in found.values()):
            self.stop()
        return [found[rank] for rank in range(self.count)]

    def run(self, function: Callable[..., Any], **more: Any) -> list[Any]:
        """What each rank's call gives; the test fails where one has an error."""
        found = self.answers(function, **more)
        errors = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(found) if not good]
        if errors:
            pytest.fail("; ".join(errors))
        return [answer for _, answer in found]

    def stop(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
