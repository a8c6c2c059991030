"""Plans made in this process, in memory, and plans that searches found, also on disk, in one file per
problem.

A file has sequences of runs, simulated when read, and searches (budget, bound, seconds), so that none is
repeated. An old or damaged file counts as empty.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rematplan.ir import InfeasibleBudget, ProblemError, TrainingGraph
from rematplan.ir.cache_folder import cache_folder, read_cached, report_damage, write_cached
from rematplan.planner.caches.latest import remember
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.plan import Plan, by_cost, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import pareto
from rematplan.planner.family.plan_family import PlanFamily

PLANS_KEPT = 32
RUNS_KEPT = 60_000
"""Limits of one problem's file: the number of plans, and the number of runs in all of them. Plans beyond them are
dropped; the newest stay."""
PROBLEMS_KEPT = 256
"""The largest number of problems with plans on disk. The files that were not written for longest are deleted."""
IN_MEMORY = 256
"""The largest number of plans that a store keeps in memory: the latest."""
AS_LONG = 0.9
"""An earlier search counts as equally long if it took at least this share of a time limit."""
NEAREST = 4
"""The number of latest plans that serve as starts for problems of another structure."""
FAMILIES = 16
"""The largest number of families of plans that a store keeps in memory: the latest."""
STARTS = 12
"""The number of plans of a family that serve as starts for another size: the cheapest that fit."""
SEARCHES_KEPT = 64
"""The largest number of searches of one problem that a file records: the latest."""

REFUSED = "refused"
Key: TypeAlias = tuple[object, ...]


class PlanStore:
    """Plans by problem and budget, in memory and on disk. Copies and pickles contain what is in memory."""

    def __init__(self) -> None:
        self._made: dict[Key, tuple[tuple[float, ...], Plan]] = {}
        self._refused: dict[Key, list[tuple[InfeasibleBudget, float]]] = {}
        self._lean: dict[str, None] = {}  # the structures of refused problems
        self._latest: list[tuple[str, Plan]] = []
        self._families: dict[str, PlanFamily] = {}

    def __bool__(self) -> bool:
        """Return whether the store has a plan in memory."""
        return bool(self._made)

    def get(self, problem: TrainingGraph, budget: int | str) -> Plan | None:
        """Return the plan in memory for this problem and budget (bytes, ``min`` or ``least``), or None. If costs
        changed, the plan has the new cost and no lower bound."""
        costs, plan = self._made.get(_key(problem, budget), ((), None))
        if plan is None or costs == _costs(problem):
            return plan
        estimate = simulate(problem, plan.schedule)
        return replace(plan, estimate=estimate, lower_bound=None, status="feasible", near=())

    def put(
        self,
        problem: TrainingGraph,
        budget: int | str,
        plan: Plan,
        *,
        lasting: bool = False,
        seconds: float = 0.0,
    ) -> None:
        """Store a plan of a problem for a budget (bytes, ``min`` or ``least``), in place of an earlier one, and add it
        to its family. Beyond `IN_MEMORY` plans, those stored first are dropped. ``lasting``: also on disk, as the plan
        of a search of so many ``seconds``."""
        key = _key(problem, budget)
        made = _costs(problem), replace(plan, fingerprint=problem.fingerprint)
        remember(self._made, key, made, IN_MEMORY)
        self._latest = [*self._latest, (problem.structure, plan)][-NEAREST:]
        self.family(problem).add(problem, plan)
        if lasting:
            self.save(problem, plan, seconds)

    def refuse(self, problem: TrainingGraph, error: InfeasibleBudget, seconds: float) -> None:
        """Record in memory that no plan was found within the error's budget, and add the error's plans to the problem's
        family. ``seconds``: the search's time limit; 0 if it had none."""
        key = _key(problem, REFUSED)
        # Without the traceback, whose frames hold the tensors of the call that is being planned.
        refusal = replace(error)
        known = [*self._refused.get(key, ()), (refusal, seconds)][-NEAREST:]
        remember(self._refused, key, known, IN_MEMORY)
        for plan in error.plans:
            self.family(problem).add(problem, plan)
        if error.plans:
            remember(self._lean, problem.structure, None, FAMILIES)

    def has_lean_plans(self, problem: TrainingGraph) -> bool:
        """Return whether a problem with the same ops and tensors was refused with plans in the error, such as that of
        the smallest peak found. Only the latest `FAMILIES` structures are known."""
        return problem.structure in self._lean

    def refusal(self, problem: TrainingGraph, budget: int, seconds: float) -> InfeasibleBudget | None:
        """Return the error to raise if a budget at least as large was refused, else None. A refusal that a longer
        search may overturn counts only if its search was not much shorter than ``seconds``."""
        for known, spent in reversed(self._refused.get(_key(problem, REFUSED), ())):
            if budget <= known.budget and (known.known != "searched" or spent >= AS_LONG * seconds):
                return replace(known, budget=budget)
        return None

    def family(self, problem: TrainingGraph) -> PlanFamily:
        """Return the family of plans of problems with the same ops and tensors, whatever their sizes; a new
        one if there is none.
        """
        family = self._families.get(problem.structure) or PlanFamily(problem)
        return remember(self._families, problem.structure, family, FAMILIES)

    def nearest(self, problem: TrainingGraph) -> tuple[Plan, ...]:
        """Return plans of this problem to start from: the latest plans of other structures, as far as they can be
        converted, then all allowed plans of its own family."""
        others = [plan for structure, plan in self._latest if structure != problem.structure]
        found = [plan for plan in (transfer_plan(other, problem) for other in others) if plan]
        family = self._families.get(problem.structure)
        return (*found, *(family.plans(problem) if family else ()))

    def serving(self, problem: TrainingGraph, budget: int) -> Plan | None:
        """Return the cheapest plan in memory within ``budget`` bytes from problems with the same ops and
        tensors; None if none fits.
        """
        family = self._families.get(problem.structure)
        return family.best_plan(problem, budget) if family else None

    def starts(self, problem: TrainingGraph, budget: int) -> tuple[Plan, ...]:
        """Return starts from problems of this structure with other sizes: the `STARTS` cheapest that fit ``budget``
        bytes, and the one nearest above.

        Empty if no other sizes were planned.
        """
        family = self._families.get(problem.structure)
        if family is None or not family.knows_other_sizes(problem):
            return ()
        return family.starts(problem, budget, STARTS)

    def saved(self, problem: TrainingGraph) -> tuple[Plan, ...]:
        """Return the plans on disk for a problem, then those for it without inverses."""
        plain = (replace(problem, inverses=()),) if problem.inverses else ()
        return tuple(plan for one in (problem, *plain) for plan in _read(_file(one), problem).plans)

    def solved(self, problem: TrainingGraph, budget: int, gap: float, seconds: float) -> Plan | None:
        """Return the cheapest plan on disk within ``budget`` bytes; None if there is none or a search may find a better
        one. No search is needed if the plan's overhead is within ``gap`` of a proven bound, or an earlier search within
        exactly this budget took at least ``seconds``."""
        content = _read(_file(problem), problem)
        fitting = [plan for plan in content.plans if plan.estimate.peak <= budget]
        if not fitting:
            return None
        best = min(fitting, key=by_cost)
        searches = content.searches
        floor = max((floor for at, floor, _ in searches if at >= budget), default=-math.inf)
        overhead = best.estimate.overhead
        # It is within ``gap`` of a bound, or this budget was searched for as long.
        done = overhead <= floor + gap or any(at == budget and spent >= seconds for at, _, spent in searches)
        if not done:
            return None
        bound = min(floor, overhead) if math.isfinite(floor) else None
        return replace(best, budget=budget, lower_bound=bound)

    def save(self, problem: TrainingGraph, plan: Plan, seconds: float = 0.0) -> None:
        """Write a plan to the problem's file and, if the plan states a budget, its search of so many ``seconds``.
        Dominated plans, plans beyond the limits, and the oldest files of other problems are removed."""
        file = _file(problem)
        content = _read(file, problem)
        found = tuple(dict.fromkeys((plan, *content.plans)))
        front = pareto(found)
        number = {name: k for k, name in enumerate(problem.op)}
        rows = [[p.strategy, [number[name] for name in runs_of(p.schedule)]] for p in found if p in front]
        rows = rows[:PLANS_KEPT]
        while sum(len(runs) for _, runs in rows) > RUNS_KEPT and len(rows) > 1:
            rows.pop()
        searches = content.searches
        if plan.budget is not None:
            floor = -1.0 if plan.lower_bound is None else plan.lower_bound
            searches = ((plan.budget, floor, seconds), *searches)[:SEARCHES_KEPT]
        if write_cached(file, json.dumps({"plans": rows, "searches": searches}, separators=(",", ":"))):
            with suppress(OSError):  # another process has deleted the file
                # The oldest files of other problems.
                for old in sorted(file.parent.glob("*.json"), key=lambda f: f.stat().st_mtime)[
                    :-PROBLEMS_KEPT
                ]:
                    old.unlink()


def _key(problem: TrainingGraph, budget: int | str) -> Key:
    """Return the key under which a plan of a problem is stored in memory: the budget, and everything in the problem
    that determines peaks."""
    sizes = tuple(t.bytes for t in problem.tensors)
    workspaces = tuple(op.workspace for op in problem.recipes)
    return problem.fingerprint, sizes, workspaces, budget


def _costs(problem: TrainingGraph) -> tuple[float, ...]:
    return tuple(op.cost for op in problem.recipes)


class _Content(NamedTuple):
    """A problem's file on disk, in which numbers are positions in `TrainingGraph.recipes`."""

    plans: tuple[Plan, ...] = ()
    searches: tuple[tuple[int, float, float], ...] = ()
    """For each: the budget in bytes, the lower bound that it proved (-1 if none), its seconds."""


def _read(file: Path, problem: TrainingGraph) -> _Content:
    """Return a file's content with plans simulated for ``problem``; empty if it is absent or damaged."""
    content = read_cached(file)
    if content is None:
        return _Content()
    names = list(problem.op)
    try:
        rows, searches = content.get("plans", ()), content.get("searches", ())  # type: ignore[attr-defined]
        return _Content(
            tuple(plan_from_runs(problem, [names[k] for k in runs], str(found)) for found, runs in rows),
            tuple((int(at), float(floor), float(spent)) for at, floor, spent in searches),
        )
    except (ProblemError, AttributeError, TypeError, ValueError, LookupError) as error:
        report_damage(file, str(error))
        return _Content()


def _file(problem: TrainingGraph) -> Path:
    sizes = [t.bytes for t in problem.tensors]
    prices = [[op.cost, op.workspace] for op in problem.recipes]
    digest = hashlib.sha256(json.dumps([problem.fingerprint, sizes, prices]).encode()).hexdigest()
    return cache_folder() / "plans" / f"{digest}.json"
