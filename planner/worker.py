"""A process that searches for better plans while its parent process trains: ``python -m rematplan.planner.worker``.

`background.BackgroundSearch` starts the process and communicates with it over pipes, one line of JSON per message. The
process never imports torch, runs at low priority, and ends with its parent. Only one worker process of a user searches
at a time on a machine. If eight processes train the same model, the first worker searches, and the other seven find its
plans on disk.

A request has ``id``, ``problem`` (a problem in the format ``rematplan.problem/1``), ``budget`` in bytes, ``strategy``
(its name), ``options`` (of the strategy) and ``starts`` (known plans). A plan is sent as the list of executed ops and
inverses in order: each is a position, from 0, in the list of the problem's ops with the list of the problem's inverses
appended. Each answer has ``id`` (that of the
request), ``done`` (whether it is the last one), ``seconds`` of the search and, if there is a plan, ``runs`` (the plan),
``strategy``, ``lower_bound`` and ``status``. If the request fails, the answer has ``error``, a text.
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
    """A context that only one worker process of this user can be in at a time; the others wait. If files cannot be
    locked, all can enter."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            cache_folder().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(cache_folder() / "planner.lock", "w")), fcntl.LOCK_EX)
        yield


def _read(stream: IO[bytes], requests: queue.Queue[Answer]) -> None:
    """Read requests from the parent process, one line of JSON each, and put them into the queue. Lines that are not
    JSON are ignored.

    At the end of the stream, end this process: the parent has ended or needs no more plans.
    """
    for line in stream:
        with suppress(ValueError):
            requests.put(json.loads(line))
    os._exit(0)


def _watch(parent: int) -> None:
    """End this process when its parent has ended. ``parent``: the parent's process id.

    The end of the pipe is not a sufficient sign: if the parent has forked, its other children keep the pipe open.
    """
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(0)


def serve(first: Answer, waiting: queue.Queue[Answer], answer: Callable[[Answer], None]) -> None:
    """Search for plans as requested, and send answers, until all requests are answered, including those that arrive
    meanwhile.

    Each new request first gets short searches, which interrupt the longer searches of earlier requests. The latest
    request is served first, because its tensor sizes are the most likely to occur again. A request that fails is
    answered with the error.
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
