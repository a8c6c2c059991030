"""A schedule that refers to ops and tensors by position, so that its memory can be computed for any sizes of the
tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.array_types import Ints
from rematplan.planner.core.schedule import Free, Run, Schedule, Step
from rematplan.planner.core.simulator import Estimate
from rematplan.planner.family.amounts_by_position import Amounts


@dataclass(frozen=True, eq=False)
class Member:
    """A schedule by position instead of by name, for any problem of one structure.

    Ops are numbered before inverses; tensors that ops write, in the order of writing.
    """

    steps: Ints
    """r for a run of op or inverse r, -1 - t for a free of tensor t."""
    events: Ints
    """t if tensor t becomes resident, -1 - t if it is freed. All are freed at the end."""
    events_before: Ints
    """For each run, the events up to and including its allocations."""
    recipes: int
    """The number of ops and inverses."""
    strategy: str
    """The name of the strategy that found it."""

    @cached_property
    def runs(self) -> Ints:
        """The ops and inverses that the schedule runs, in order, repeats included, as positions among ops and inverses
        (ops first)."""
        return self.steps[self.steps >= 0]

    @cached_property
    def counts(self) -> Ints:
        """How often the schedule runs each op and inverse: an array over ops, then inverses."""
        return np.bincount(self.runs, minlength=self.recipes)

    def resident_bytes(self, amounts: Amounts) -> Ints:
        """Return the bytes resident during each run, inputs and workspace included, for a problem of these
        amounts.
        """
        change = np.where(self.events >= 0, 1, -1) * amounts.sizes[_tensor(self.events)]
        resident = np.concatenate(([0], np.cumsum(change)))
        found: Ints = amounts.fixed + resident[self.events_before] + amounts.workspaces[self.runs]
        return found

    def estimate(self, amounts: Amounts) -> Estimate:
        """Return the schedule's peak in bytes, cost and overhead in a problem with the sizes, workspaces and costs
        ``amounts``. The result equals that of `simulate`."""
        resident = self.resident_bytes(amounts)
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
        """Return whether no op that may run only once (``amounts.once``) runs more than once in the schedule."""
        return not bool((self.counts[amounts.once] > 1).any())


def member_of(graph: TrainingGraph, schedule: Schedule, strategy: str) -> Member:
    """Convert a valid schedule of a problem to positions; `ProblemError` if it runs what the problem lacks, or frees
    what no run has left resident. ``strategy``: the name of the strategy that found it."""
    number = {t: i for i, t in enumerate(graph.producer)}
    recipe = {name: i for i, name in enumerate(graph.op)}
    writes = [[number[t] for t in op.writes if t in number] for op in graph.op.values()]
    steps: list[int] = []
    events: list[int] = []
    before: list[int] = []
    resident: dict[int, None] = {}
    for step in schedule:
        if isinstance(step, Run):
            if step.op not in recipe:
                raise ProblemError(
                    f"{graph.name}: the schedule runs {step.op!r}, which the problem does not have"
                )
            r = recipe[step.op]
            fresh = [t for t in writes[r] if t not in resident]
            resident.update(dict.fromkeys(fresh))
            events += fresh
            steps.append(r)
            before.append(len(events))
        else:
            t = number.get(step.tensor, -1)
            if t not in resident:
                raise ProblemError(
                    f"{graph.name}: the schedule frees {step.tensor!r}, which no run has left resident"
                )
            del resident[t]
            events.append(-1 - t)
            steps.append(-1 - t)
    events += [-1 - t for t in resident]
    return Member(_ints(steps), _ints(events), _ints(before), len(recipe), strategy)


def step_table(graph: TrainingGraph) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of a problem's schedules: runs of ops, then of inverses; and frees, in the order of
    writing.
    """
    return tuple(Run(name) for name in graph.op), tuple(Free(t) for t in graph.producer)


def schedule_of(member: Member, table: tuple[Sequence[Step], Sequence[Step]]) -> Schedule:
    """Convert a schedule by position to names. ``table``: `step_table` of the problem."""
    runs, frees = table
    return tuple(runs[s] if s >= 0 else frees[-1 - s] for s in member.steps.tolist())


def _tensor(events: Ints) -> Ints:
    return np.where(events >= 0, events, -1 - events)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
