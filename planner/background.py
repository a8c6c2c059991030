"""Search for better plans in another process (`rematplan.planner.worker`) while this one trains."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.ir.problem_json import problem_to_json
from rematplan.planner.core.plan import Plan, plan_from_json
from rematplan.planner.core.schedule import runs_of

Heard: TypeAlias = Callable[[Plan | None, bool], None]
"""A callback for the results of a search in another process. It is called in another thread, with a better plan (or
None) and with whether the search has ended."""

LOG = logging.getLogger("rematplan")


@dataclass(frozen=True)
class _Search:
    """A search that is going on in another process."""

    process: subprocess.Popen[bytes]
    problem: TrainingGraph
    budget: int
    """Bytes."""
    heard: Heard


class BackgroundSearch:
    """Searches for plans in another process. If that process ends, its searches end without a plan, and the next
    search starts another. Threads may share this."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._waiting: dict[int, _Search] = {}
        self._count = 0

    def submit(
        self,
        problem: TrainingGraph,
        budget: int,
        strategy: str,
        options: Mapping[str, object],
        starts: Sequence[Plan],
        heard: Heard,
    ) -> bool:
        """Send a search to the other process, which is started if none runs. Return False if it cannot be started or
        reached; else ``heard`` gets the results."""
        with self._lock:
            process = self._begun()
            if process is None or process.stdin is None:
                return False
            self._count += 1
            message = {
                "id": self._count,
                "problem": problem_to_json(problem),
                "budget": budget,
                "strategy": strategy,
                "options": dict(options),
                "starts": [runs_of(plan.schedule) for plan in starts],
            }
            self._waiting[self._count] = _Search(process, problem, budget, heard)
            try:
                process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
                process.stdin.flush()
            except (OSError, ValueError):
                del self._waiting[self._count]
                return False
            return True

    def stop(self) -> None:
        """Kill the process that searches. All searches in progress end without a plan."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()

    @property
    def waiting(self) -> int:
        """The number of searches in progress, those included that wait for their turn."""
        return len(self._waiting)

    @property
    def pid(self) -> int | None:
        """The process id of the process that searches; None if none was started."""
        return None if self._process is None else self._process.pid

    def _begun(self) -> subprocess.Popen[bytes] | None:
        """Return the process that searches; start it unless one that this Python process started still runs. None if
        that fails. After a fork, searches of the parent are forgotten."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        # A forked child does not use its parent's process.
        if self._owner != os.getpid():
            self._waiting = {}
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rematplan.planner.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C must not reach this process. A session of its own would prevent that too, but Linux shares the
                # processor evenly among sessions (autogroup), whatever the niceness of their processes.
                process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        except (OSError, ValueError) as error:
            LOG.info("no process for planning could be started: %s", error)
            self._process = None
            return None
        self._owner = os.getpid()
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        return self._process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on a process's answers until it ends; then end the searches that it leaves, without a plan."""
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError, KeyError, TypeError):
                self._hear(json.loads(line))
        # A killed process closes its output before `poll` says that it ended: a further search would be sent to it.
        process.kill()
        process.wait()
        with self._lock:
            lost = {at: search for at, search in self._waiting.items() if search.process is process}
            for at in lost:
                del self._waiting[at]
        if lost:
            LOG.info(
                "the process that searches for better plans ended; training goes on with the plans it has"
            )
        for search in lost.values():
            search.heard(None, True)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        """Pass a message to its search's callback: with its plan if that is valid and within the budget, else with
        None. `KeyError` if the message belongs to no search in progress."""
        with self._lock:
            search = self._waiting[answer["id"]]
            if answer["done"]:
                del self._waiting[answer["id"]]
        if "error" in answer:
            LOG.info("a plan could not be searched in the background: %s", answer["error"])
        plan = None
        if "plan" in answer:
            with suppress(ProblemError):
                plan = plan_from_json(answer["plan"], search.problem)
                plan = replace(plan, budget=search.budget, fingerprint=search.problem.fingerprint)
        if plan is not None and plan.peak > search.budget:
            plan = None
        search.heard(plan, bool(answer["done"]))


@cache
def shared() -> BackgroundSearch:
    """Return the one `BackgroundSearch` of this Python process."""
    return BackgroundSearch()
