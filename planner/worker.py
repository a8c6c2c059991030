"""A process that searches for better plans while its parent trains: ``python -m rematplan.planner.worker``.

Messages are lines of JSON. A request has ``id``, ``problem`` (``rematplan.problem/1``), ``budget`` in bytes,
``strategy``, ``options`` and ``starts``: the runs of known plans. An answer has ``id``, ``done``, ``seconds``, and
``plan`` (``rematplan.plan/1``) or ``error``.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import IO, Any

from rematplan.ir import ProblemError, UsageError
from rematplan.ir.cache_folder import cache_folder
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.search_job import Answer, SearchJob

NICE = 10
"""By how much the process raises its niceness, so that training has priority."""
WATCH = 1.0
"""Seconds between two checks of whether the parent process is alive."""


@contextmanager
def _alone() -> Iterator[None]:
    """A context for one worker of this user at a time; others wait, and then find its plans on disk. Without
    file locks all enter.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            cache_folder().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(cache_folder() / "planner.lock", "w")), fcntl.LOCK_EX)
        yield


def _read(stream: IO[bytes], requests: queue.Queue[Answer]) -> None:
    """Put the parent's requests, lines of JSON, into the queue; ignore other lines. At the stream's end, end
    this process.
    """
    for line in stream:
        with suppress(ValueError):
            requests.put(json.loads(line))
    os._exit(0)


def _watch(parent: int) -> None:
    """End this process when its parent (a process id) has ended."""
    # If the parent has forked, its children keep the pipe open after it ends.
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(0)


def serve(first: Answer, waiting: queue.Queue[Answer], answer: Callable[[Answer], None]) -> None:
    """Answer all requests, those included that arrive meanwhile, the latest first, and return when none is left.
    Errors are answered too."""
    requests: list[Answer] = [first]
    begun: list[tuple[object, SearchJob, Iterator[Answer]]] = []
    while requests or begun:
        while not waiting.empty():
            requests.append(waiting.get())
        if requests:
            request = requests.pop()
            with _errors_answered(request.get("id"), answer):
                job = SearchJob(request, PlanStore())
                for found in job.polish():
                    answer({"id": request["id"], **found})
                # A new request gets short searches, which interrupt the longer ones of earlier requests.
                begun.append((request["id"], job, job.search(lambda: not waiting.empty())))
            continue
        number, job, search = begun.pop()
        with _errors_answered(number, answer):
            more = next(search, None)
            if more is None:
                answer({"id": number, **job.done()})
                continue
            begun.append((number, job, search))
            if more:
                answer({"id": number, **more})


@contextmanager
def _errors_answered(number: object, answer: Callable[[Answer], None]) -> Iterator[None]:
    try:
        yield
    except (ProblemError, UsageError, KeyError, TypeError, ValueError) as error:
        answer({"id": number, "done": True, "seconds": 0.0, "error": str(error)})


def main() -> None:
    """Read requests from standard input and write answers to standard output, at low priority. The process ends when
    its parent ends or closes the stream."""
    with suppress(OSError, AttributeError):
        os.nice(NICE)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # solvers print to standard output
    requests: queue.Queue[Answer] = queue.Queue()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        first = requests.get()
        with _alone():
            serve(first, requests, partial(_write, out))


def _write(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
