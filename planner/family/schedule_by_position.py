"""A schedule by position: the tensors that each step allocates and frees, for any sizes of the tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.schedule import Free, Run, Schedule, Step
from rematplan.planner.core.simulator import Estimate
from rematplan.planner.family.amounts_by_position import Amounts, Ints


@dataclass(frozen=True, eq=False)
class Member:
    """A schedule in which positions stand for names, so that it can be evaluated for any problem of its structure.

    ``steps``: r for a run of the op or inverse at position r (ops first); -1 - t for freeing the tensor at position
    t, among the tensors that ops write. ``events``: t where the tensor at position t becomes resident, -1 - t where
    it is freed, in order. At the end everything is freed, so that the bytes of all events sum to 0.
    ``events_before``: for each run, the number of events up to and including what it allocates. ``recipes``: the
    number of ops and inverses of the structure. ``strategy``: the name of the strategy that found the schedule.
    """

    steps: Ints
    events: Ints
    events_before: Ints
    recipes: int
    strategy: str

    @cached_property
    def runs(self) -> Ints:
        """The positions of the ops and inverses that run, in order, repeats included."""
        return self.steps[self.steps >= 0]

    @cached_property
    def counts(self) -> Ints:
        """How often each op and inverse runs, by position."""
        return np.bincount(self.runs, minlength=self.recipes)

    def held(self, amounts: Amounts) -> Ints:
        """Return the bytes that are resident during each run, inputs and workspace included. ``amounts``: the sizes,
        workspaces and costs of a problem of this structure."""
        change = np.where(self.events >= 0, 1, -1) * amounts.sizes[_tensor(self.events)]
        resident = np.concatenate(([0], np.cumsum(change)))
        found: Ints = amounts.fixed + resident[self.events_before] + amounts.workspaces[self.runs]
        return found

    def estimate(self, amounts: Amounts) -> Estimate:
        """Return the schedule's peak, cost and overhead in a problem with these sizes, workspaces and costs, equal
        to the result of `simulate`."""
        resident = self.held(amounts)
        peak, peak_at = amounts.fixed, -1
        if resident.size and int(resident.max()) > peak:
            first = int(resident.argmax())
            peak, peak_at = int(resident[first]), int(np.flatnonzero(self.steps >= 0)[first])
        cost = math.fsum(amounts.costs[self.runs].tolist())
        return Estimate(
            peak=peak,
            peak_at=peak_at,
            cost=cost,
            overhead=cost / amounts.base_cost - 1 if amounts.base_cost else 0.0,
            reruns=int(np.maximum(self.counts - 1, 0).sum()),
        )

    def is_allowed(self, amounts: Amounts) -> bool:
        """Return whether each op that may run only once (``amounts.once``) runs at most once."""
        return not bool((self.counts[amounts.once] > 1).any())


def member_of(graph: TrainingGraph, schedule: Schedule, strategy: str) -> Member:
    """Convert a valid schedule of a problem to positions, so that it can be evaluated for other sizes and costs.

    ``strategy``: the name of the strategy that found the schedule.

    Raises:
        ProblemError: the schedule names an op or tensor that the problem does not have.
    """
    number = {t: i for i, t in enumerate(graph.producer)}
    recipe = {name: i for i, name in enumerate(graph.op)}
    writes = [[number[t] for t in op.writes if t in number] for op in graph.op.values()]
    steps: list[int] = []
    events: list[int] = []
    before: list[int] = []
    resident: dict[int, None] = {}
    try:
        for step in schedule:
            if isinstance(step, Run):
                r = recipe[step.op]
                fresh = [t for t in writes[r] if t not in resident]
                resident.update(dict.fromkeys(fresh))
                events += fresh
                steps.append(r)
                before.append(len(events))
            else:
                t = number[step.tensor]
                del resident[t]
                events.append(-1 - t)
                steps.append(-1 - t)
    except KeyError as error:
        raise ProblemError(
            f"{graph.name}: the schedule names {error}, which the problem does not have"
        ) from None
    events += [-1 - t for t in resident]
    return Member(_ints(steps), _ints(events), _ints(before), len(recipe), strategy)


def step_table(graph: TrainingGraph) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of which schedules of a problem consist: by position, the run of each op and inverse, and the
    freeing of each tensor that an op writes."""
    return tuple(Run(name) for name in graph.op), tuple(Free(t) for t in graph.producer)


def schedule_of(member: Member, table: tuple[Sequence[Step], Sequence[Step]]) -> Schedule:
    """Return a member's schedule with the names of a problem. ``table``: the result of `step_table` for that
    problem."""
    runs, frees = table
    return tuple(runs[s] if s >= 0 else frees[-1 - s] for s in member.steps.tolist())


def _tensor(events: Ints) -> Ints:
    return np.where(events >= 0, events, -1 - events)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
