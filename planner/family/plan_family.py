"""A family of plans: schedules of problems with the same ops and tensors, found at some sizes and evaluated at
others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import with_frees
from rematplan.planner.family.amounts_by_position import Amounts, amounts_of
from rematplan.planner.family.evaluation import Evaluation, Stack, stack
from rematplan.planner.family.schedule_by_position import Member, member_of, schedule_of, step_table


@dataclass(frozen=True)
class FamilyLimits:
    """Limits of a `PlanFamily`: a set of schedules that were found for some sizes of the tensors and are evaluated at
    others."""

    members: int = 36
    """The largest number of schedules in a family. The Pareto front of all plans found for one sequence length, at
    two or three budgets, had 18 to 34 plans for GPT-12, BERT-6, Llama-8 and U-Net."""
    sizes_met: int = 6
    """The largest number of problems for which the schedules of a family are compared. Of all problems for which
    schedules were added, they are the one with the most bytes and the latest ones. Chosen without a measurement. For
    each of these problems, all schedules are evaluated whenever one is added."""


LIMITS = FamilyLimits()


@dataclass(frozen=True, eq=False)
class _State:
    """The content of a `PlanFamily`, replaced as a whole at each change."""

    members: tuple[Member, ...]
    stack: Stack
    """The members, joined for evaluation."""
    met: tuple[Amounts, ...]
    """The amounts of the problems for which members are compared."""
    evaluations: tuple[Evaluation, ...]
    """Of all members, for each of these problems."""


class PlanFamily:
    """Plans of one structure, as schedules by position (*members*) that can be evaluated at any sizes.
    Threads may share it.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.structure = graph.structure
        self._tensors = len(graph.producer)
        self._named = _names(graph), step_table(graph)
        runs = [op.name for op in graph.ops]
        # The first member runs every op once, and is never removed.
        first = member_of(graph, with_frees(graph, runs), "store_all")
        self._state = self._made((first,), (amounts_of(graph),))

    def __len__(self) -> int:
        return len(self._state.members)

    @property
    def members(self) -> tuple[Member, ...]:
        """The schedules of the family, in the order in which `evaluate` returns their peaks and costs."""
        return self._state.members

    @property
    def met(self) -> tuple[Amounts, ...]:
        """The sizes, workspaces and costs of the problems for which the schedules are compared: the largest problem
        and the latest ones."""
        return self._state.met

    def add(self, graph: TrainingGraph, plan: Plan) -> None:
        """Add the schedule of a plan that was found for a problem of this structure (the same ops and tensors, any
        sizes); `ProblemError` for a problem of another structure."""
        self._check(graph)
        self.add_member(amounts_of(graph), member_of(graph, plan.schedule, plan.strategy))

    def add_member(self, amounts: Amounts, member: Member) -> None:
        """Add a schedule found for a problem of these amounts. Members are compared at these, as long as they are among
        `met`. If there are too many members, the one that contributes least is removed, but never the first.
        """
        state = self._state
        members = state.members
        known = any(np.array_equal(m.steps, member.steps) for m in members)
        met = _with_latest(state.met, amounts)
        if known and len(met) == len(state.met) and all(map(Amounts.equals, met, state.met)):
            return
        state = self._made(members if known else (*members, member), met)
        while len(state.members) > LIMITS.members:
            gains = _gains(state.evaluations, state.met)
            gains[0] = np.inf
            worst = int(np.argmin(gains))  # of equal ones the oldest
            state = self._made((*state.members[:worst], *state.members[worst + 1 :]), met)
        self._state = state

    def evaluate(self, amounts: Amounts) -> Evaluation:
        """Return the peaks and costs of all schedules of the family for a problem with the sizes, workspaces and
        costs ``amounts``."""
        return self._state.stack.evaluate(amounts)

    def best(self, amounts: Amounts, budget: int) -> Member | None:
        """Return the cheapest allowed schedule within ``budget`` bytes for a problem of these amounts; None
        if none fits.
        """
        members = self.fitting(amounts, budget, 1)
        return members[0] if members else None

    def fitting(self, amounts: Amounts, budget: int, count: int) -> tuple[Member, ...]:
        """Return up to ``count`` allowed schedules within ``budget`` bytes, the cheapest first."""
        state = self._state
        return tuple(state.members[m] for m in state.stack.evaluate(amounts).fitting(budget)[:count])

    def nearest_over(self, amounts: Amounts, budget: int) -> Member | None:
        """Return the allowed schedule that exceeds ``budget`` bytes by the least; None if all fit."""
        state = self._state
        found = state.stack.evaluate(amounts).nearest_over(budget)
        return None if found is None else state.members[found]

    def least(self, amounts: Amounts) -> Member:
        """Return the allowed schedule with the smallest peak for a problem of these amounts."""
        found = self.nearest_over(amounts, -1)
        assert found is not None, "the member that runs every op once is always allowed"
        return found

    def plan(self, graph: TrainingGraph, member: Member, amounts: Amounts | None = None) -> Plan:
        """Return a schedule as a plan of ``graph``; `ProblemError` if the graph has another structure. ``amounts``: of
        the graph, if known."""
        self._check(graph)
        names, table = self._named
        if names != _names(graph):
            table = step_table(graph)
            self._named = _names(graph), table
        schedule = schedule_of(member, table)
        estimate = member.estimate(amounts_of(graph) if amounts is None else amounts)
        return Plan(graph.name, member.strategy, schedule, estimate)

    def plans(self, graph: TrainingGraph) -> tuple[Plan, ...]:
        """Return all allowed schedules as plans of ``graph``; `ProblemError` if the graph has another structure."""
        amounts = amounts_of(graph)
        allowed = (member for member in self.members if member.is_allowed(amounts))
        return tuple(self.plan(graph, member, amounts) for member in allowed)

    def best_plan(self, graph: TrainingGraph, budget: int) -> Plan | None:
        """Return the cheapest schedule of the family within ``budget`` bytes as a plan of the problem ``graph``; None
        if none fits. `ProblemError` if the graph has another structure."""
        self._check(graph)
        amounts = amounts_of(graph)
        member = self.best(amounts, budget)
        return None if member is None else replace(self.plan(graph, member, amounts), budget=budget)

    def starts(self, graph: TrainingGraph, budget: int, count: int) -> tuple[Plan, ...]:
        """Return plans of ``graph`` to start from: the ``count`` cheapest that fit, then the one nearest above
        ``budget`` bytes. `ProblemError` if the graph has another structure."""
        amounts = amounts_of(graph)
        over = self.nearest_over(amounts, budget)
        members = (*self.fitting(amounts, budget, count), *([over] if over else []))
        return tuple(self.plan(graph, member, amounts) for member in members)

    def knows_other_sizes(self, graph: TrainingGraph) -> bool:
        """Return whether the schedules are also compared for a problem whose tensors have other sizes than those of
        ``graph``."""
        amounts = amounts_of(graph)
        return any(
            met.fixed != amounts.fixed or not np.array_equal(met.sizes, amounts.sizes) for met in self.met
        )

    def _check(self, graph: TrainingGraph) -> None:
        if graph.structure != self.structure:
            raise ProblemError(f"{graph.name!r} has other ops or storages than the plans' problem")

    def _made(self, members: tuple[Member, ...], met: tuple[Amounts, ...]) -> _State:
        rows = stack(members, self._tensors)
        return _State(members, rows, met, tuple(rows.evaluate(amounts) for amounts in met))


def _names(graph: TrainingGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(graph.op), tuple(graph.producer)


def _with_latest(met: tuple[Amounts, ...], amounts: Amounts) -> tuple[Amounts, ...]:
    """Return ``met`` with ``amounts`` at the end; beyond `LIMITS.sizes_met` entries, the largest and the latest."""
    met = (*(known for known in met if not known.equals(amounts)), amounts)
    if len(met) <= LIMITS.sizes_met:
        return met
    largest = max(met, key=lambda known: known.total)
    rest = [known for known in met if known is not largest]
    return (largest, *rest[1 - LIMITS.sizes_met :])


def _gains(evaluations: Sequence[Evaluation], met: Sequence[Amounts]) -> np.ndarray:
    """Return how much each schedule contributes to the Pareto fronts of the problems ``met``: areas that it alone
    dominates, in shares (SMS-EMOA, Beume et al. 2007). It is infinite for the ends of a front. ``evaluations``: for
    each problem."""
    gains = np.zeros(evaluations[0].peaks.size)
    for found, amounts in zip(evaluations, met, strict=True):
        front = np.array(found.front())
        peaks = found.peaks[front] / max(1, int(found.peaks.max()))
        overheads = found.costs[front] / (amounts.base_cost or 1.0)
        # The area that no other schedule dominates; infinite at a front's ends, 0 off the front.
        area = np.full(front.size, np.inf)
        area[1:-1] = (peaks[:-2] - peaks[1:-1]) * (overheads[2:] - overheads[1:-1])
        gains[front] += area
    return gains
