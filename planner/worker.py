"""A process that searches for better plans while its parent trains: ``python -m rematplan.planner.worker``.

`background.BackgroundSearch` starts the process and communicates with it over pipes, one line of JSON per message.
The process never imports torch, runs at low priority, and ends with its parent. On one machine, only one such process
of a user searches at a time: if eight processes train one model, its plan is searched once, and the others find it on
disk.

A request has ``id``, ``problem`` (``rematplan.problem/1``), ``budget`` in bytes, ``strategy`` and ``options``, and
``starts`` (sequences of positions among the problem's ops, followed by its inverses). Each answer has ``id``,
``done``, ``seconds`` of the search and, if there is a plan, ``runs``, ``strategy``, ``lower_bound`` and ``status``.
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
"""The increment of the process's niceness, so that training goes first."""
WATCH = 1.0
"""Seconds between two checks whether the parent is alive."""


@contextmanager
def _alone() -> Iterator[None]:
    """Ensure that of all such processes of this user only one is in the block at a time, if files can be locked."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            cache_folder().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(cache_folder() / "planner.lock", "w")), fcntl.LOCK_EX)
        yield


def _read(stream: IO[bytes], requests: queue.Queue[Answer]) -> None:
    """Put requests into the queue. At the end of the stream the parent has ended or needs no more: end this
    process.
    """
    for line in stream:
        with suppress(ValueError):
            requests.put(json.loads(line))
    os._exit(0)


def _watch(parent: int) -> None:
    """End this process when its parent has ended.

    The end of the pipe is not enough: if the parent has forked, its children hold the pipe open.
    """
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(0)


def serve(first: Answer, waiting: queue.Queue[Answer], answer: Callable[[Answer], None]) -> None:
    """Answer a first request for a search, and all requests that arrive meanwhile.

    Short searches for a new request interrupt longer searches of earlier requests. Of several requests the latest
    goes first: its sizes are the most likely to occur again.

    Args:
        first: the first request.
        waiting: a queue to which another thread adds further requests.
        answer: called with each answer, to send it to the parent.
    """
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
    """Answer requests from standard input on standard output, until the parent ends. The process's priority is
    lowered."""
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
