"""A process that searches for better plans while its parent trains: ``python -m rematplan.planner.worker``.

`background.BackgroundSearch` starts it and talks to it over pipes, one line of JSON a message. It never imports torch,
runs at low priority, and ends as soon as its parent does. One search a machine and user goes on at a time: eight
processes that train one model have its plan searched once, and find it on disk.

A request has ``id``, ``problem`` (``rematplan.problem/1``), ``budget`` in bytes, ``strategy`` and ``options``,
``starts`` (sequences of positions among the problem's ops, then its inverses) and ``gap``. Each answer has the ``id``,
``done``, ``seconds`` of the search and, where there is a plan, ``runs``, ``strategy``, ``lower_bound``, ``status``.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import IO, Any

from rematplan.ir import InfeasibleBudget, ProblemError, TrainingGraph, UsageError
from rematplan.ir.cache_folder import cache_folder
from rematplan.ir.problem_json import problem_from_json
from rematplan.planner.annealing.polish import polished
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.registry import LIMIT, strategy

NICE = 10
"""What is added to the process's niceness: training goes first."""
WATCH = 1.0
"""Seconds between two looks whether the parent is still there."""
SHARES = (0.1, 0.3, 1.0)
"""Of the time that is left, what each of the successive searches gets: a plan that is much better is used soon."""


def names_of(problem: TrainingGraph) -> list[str]:
    """The names that positions in messages stand for."""
    return [op.name for op in (*problem.ops, *problem.inverses)]


def plan_of(problem: TrainingGraph, answer: Mapping[str, Any], budget: int) -> Plan:
    """The plan that an answer states, simulated anew.

    Raises:
        ProblemError, ValueError, LookupError: it states none.
    """
    names = names_of(problem)
    plan = plan_from_runs(problem, [names[k] for k in answer["runs"]], str(answer["strategy"]))
    bound = answer["lower_bound"]
    return replace(
        plan,
        budget=budget,
        lower_bound=None if bound is None else float(bound),
        status="optimal" if answer["status"] == "optimal" else "feasible",
        fingerprint=problem.fingerprint,
    )


def message_of(problem: TrainingGraph, plan: Plan) -> dict[str, Any]:
    """The fields of an answer that state a plan."""
    number = {name: k for k, name in enumerate(names_of(problem))}
    return {
        "runs": [number[name] for name in runs_of(plan.schedule)],
        "strategy": plan.strategy,
        "lower_bound": plan.lower_bound,
        "status": plan.status,
    }


def answers(request: Mapping[str, Any], store: PlanStore) -> Iterator[dict[str, Any]]:
    """Search as a request asks; an answer for each better plan, and a last one that is ``done``."""
    began = time.monotonic()
    problem, budget, gap = (
        problem_from_json(request["problem"]),
        int(request["budget"]),
        float(request["gap"]),
    )
    search = strategy(request["strategy"], **request["options"])
    limit = float(getattr(search, LIMIT))
    names = names_of(problem)
    starts = [plan_from_runs(problem, [names[k] for k in runs], "start") for runs in request["starts"]]
    best = min((p for p in starts if p.estimate.peak <= budget), key=_cost, default=None)
    known = store.solved(problem, budget, gap, limit)
    for plan in (known,) if known else _searched(search, problem, budget, starts, limit, store):
        better = best is None or _cost(plan) < _cost(best) or plan.lower_bound is not None
        best = min((p for p in (plan, best) if p is not None), key=_cost)
        if better:
            found = replace(best, lower_bound=plan.lower_bound, status=plan.status)
            yield {"done": False, "seconds": time.monotonic() - began, **message_of(problem, found)}
    yield {"done": True, "seconds": time.monotonic() - began}


def _searched(
    search: Strategy,
    problem: TrainingGraph,
    budget: int,
    starts: Sequence[Plan],
    limit: float,
    store: PlanStore,
) -> Iterator[Plan]:
    """The plans of successive searches, each of which begins with all before it; short ones first where plans of other
    sizes are known."""
    compile_kernels()  # before the clock starts
    began = time.monotonic()
    known = [*starts, *store.kept(problem)]
    if len(starts) > 1:  # they are of other sizes, and not all of them fit
        seed, keep_order = int(getattr(search, "seed", 0)), bool(getattr(search, "keep_order", False))
        for plan in polished(problem, budget, starts, seed=seed, keep_order=keep_order):
            known.append(plan)
            yield plan
    for share in SHARES:
        left = limit - (time.monotonic() - began)
        if left <= 0:
            return
        try:
            plan = replace(search, **{LIMIT: share * left}).plan(problem, budget, starts=known)
        except InfeasibleBudget:
            continue
        known.append(plan)
        last = share == SHARES[-1] or plan.status == "optimal"
        store.put(problem, budget, plan, lasting=search.lasting, seconds=limit if last else 0.0)
        yield plan
        if plan.status == "optimal" or _is_within(plan, search):
            return


def _is_within(plan: Plan, search: Strategy) -> bool:
    return plan.gap is not None and plan.gap <= getattr(search, "gap", 0.0)


def _cost(plan: Plan) -> tuple[float, int]:
    return plan.estimate.cost, plan.estimate.peak


@contextmanager
def _alone() -> Iterator[None]:
    """A block that no other such process of this user is in; where no file can be locked, all may be in it."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            cache_folder().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(cache_folder() / "planner.lock", "w")), fcntl.LOCK_EX)
        yield


def _read(stream: IO[bytes], requests: queue.Queue[Any]) -> None:
    """Queue the requests; at the stream's end the parent is gone, or wants no more."""
    for line in stream:
        with suppress(ValueError):
            requests.put(json.loads(line))
    os._exit(0)


def _watch(parent: int) -> None:
    """End this process when its parent has ended. The pipe's end alone does not tell that where the parent has forked:
    its children hold the pipe open."""
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(0)


def main() -> None:
    """Answer requests until the parent ends."""
    with suppress(OSError, AttributeError):
        os.nice(NICE)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # solvers print there
    requests: queue.Queue[Any] = queue.LifoQueue()  # the latest size is the likeliest to come again
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        request = requests.get()
        try:
            with _alone():
                for answer in answers(request, PlanStore()):
                    _write(out, {"id": request["id"], **answer})
        except (ProblemError, UsageError, KeyError, TypeError, ValueError) as error:
            _write(out, {"id": request.get("id"), "done": True, "seconds": 0.0, "error": str(error)})


def _write(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
