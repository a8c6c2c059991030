"""One search for a better plan in the worker process (`planner.worker`): first short searches from known plans, then
longer searches with the requested strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rematplan.ir import InfeasibleBudget
from rematplan.ir.problem_json import problem_from_json
from rematplan.planner.annealing.polish import polished
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan, by_cost, plan_from_runs, plan_to_json
from rematplan.planner.core.search_rules import rules_of
from rematplan.planner.core.strategy import Enough
from rematplan.planner.registry import LIMIT, strategy

SHARES = (0.1, 0.3, 1.0)
"""For each of the longer searches, the share of the remaining time that it gets. The first is short, so that training
soon gets a better plan."""

Answer = dict[str, Any]
"""A message of the worker process to its parent: JSON data."""


class SearchJob:
    """One request to the worker for a better plan, with the plans found so far. ``request``: as `planner.worker`
    describes. A malformed one raises `ProblemError`, `UsageError`, `KeyError`, `TypeError` or `ValueError`. New plans
    are added to ``store`` on disk."""

    def __init__(self, request: Mapping[str, Any], store: PlanStore) -> None:
        self.began, self.store = time.monotonic(), store
        self.problem, self.budget = problem_from_json(request["problem"]), int(request["budget"])
        self.strategy = strategy(request["strategy"], **request["options"])
        self.limit = float(getattr(self.strategy, LIMIT))
        self.gap = float(getattr(self.strategy, "gap", 0.0))
        self.starts = [plan_from_runs(self.problem, runs, "start") for runs in request["starts"]]
        self.found = list(self.starts)
        self.best: Plan | None = min(
            (p for p in self.starts if p.estimate.peak <= self.budget), key=by_cost, default=None
        )

    def polish(self) -> Iterator[Answer]:
        """Run short searches from the request's plans, if there are two or more. Yield a message for each
        better plan.

        Nothing is searched if the plan on disk is good enough (`PlanStore.solved`).
        """
        if len(self.starts) < 2 or self._solved() is not None:
            return
        for plan in polished(self.problem, self.budget, self.starts, rules=rules_of(self.strategy)):
            yield from self._take(plan)

    def search(self, urgent: Callable[[], bool] = lambda: False) -> Iterator[Answer]:
        """Yield messages of better plans and of plans with a bound: from the plan on disk if it is good enough, else
        from longer and longer searches. These end with the time limit or a good enough plan; an empty message follows
        each search without such a plan. If ``urgent`` returns True, a search ends early and is repeated."""
        # A plan on disk that is good enough is the answer.
        known = self._solved()
        if known is not None:
            yield from self._take(known)
            return
        compile_kernels()  # before the clock starts
        self.found += self.store.saved(self.problem)
        spent, at = 0.0, 0
        while at < len(SHARES) and spent < self.limit:
            began = time.thread_time()
            plan, interrupted = self._searched(SHARES[at] * (self.limit - spent), urgent)
            spent += time.thread_time() - began
            at += not interrupted
            if plan is None:
                yield {}
                continue
            done = plan.status == "optimal" or (plan.gap is not None and plan.gap <= self.gap)
            seconds = self.limit if at == len(SHARES) or plan.status == "optimal" else 0.0
            self.store.put(self.problem, self.budget, plan, lasting=self.strategy.lasting, seconds=seconds)
            yield from self._take(plan)
            if done:
                return
            yield {}

    def done(self) -> Answer:
        """Return the last message for the parent process: the request is done, and the seconds since the job was
        created."""
        return {"done": True, "seconds": time.monotonic() - self.began}

    def _searched(self, seconds: float, urgent: Callable[[], bool]) -> tuple[Plan | None, bool]:
        """Run the strategy for ``seconds``. Return its plan, or None if it found none that fits, and whether ``urgent``
        ended it early."""
        interrupted = False

        def report(_fraction: float, _text: str) -> None:
            nonlocal interrupted
            if urgent():
                interrupted = True
                raise Enough

        limit: dict[str, Any] = {LIMIT: seconds}
        search = replace(self.strategy, **limit)
        try:
            return search.plan(self.problem, self.budget, report, self.found), interrupted
        except InfeasibleBudget:
            return None, interrupted
        except Enough:
            return None, True

    def _solved(self) -> Plan | None:
        return self.store.solved(self.problem, self.budget, self.gap, self.limit)

    def _take(self, plan: Plan) -> Iterator[Answer]:
        """Record a plan. If it is cheaper than the best plan or has a bound, yield a message of the best plan, with the
        bound and the status of this one."""
        self.found.append(plan)
        better = self.best is None or by_cost(plan) < by_cost(self.best) or plan.lower_bound is not None
        self.best = min((p for p in (plan, self.best) if p is not None), key=by_cost)
        if better:
            best = replace(self.best, lower_bound=plan.lower_bound, status=plan.status)
            yield {"done": False, "seconds": time.monotonic() - self.began, "plan": plan_to_json(best)}
