"""Evaluate known plans at new sizes, between sizes with known problems, without capturing the step.

Bytes are exact expressions of the sizes, costs are interpolated, and the larger workspace counts. Nothing is
evaluated if an op that chooses among kernels has a workspace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.core.array_types import Flags, Floats, Ints
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.family.amounts_by_position import Amounts, amounts_of
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.planner.family.tensor_positions import TensorPositions, tensor_positions, with_amounts
from rematplan.plans.refining import Rechoosing, Refinement, Refining, StepPlan
from rematplan.plans.sized_costs import KERNELS, ends_and_latest
from rematplan.runtime.graph.captured_step import CapturedStep

CORNERS = 8
"""The largest number of sizes whose amounts are kept: the smallest, the largest and the latest sizes."""
ONE_KERNEL = re.compile("flash_attention_for_cpu")
"""Ops that `KERNELS` matches, but whose workspace grows with each size."""
ROUNDING = 1e-6
"""Interpolated bytes are rounded up, unless they exceed a whole number by less than this because of rounding errors."""


@dataclass(frozen=True, eq=False)
class Corner:
    """A combination of sizes for which the planning problem was made."""

    sizes: Ints
    """The values, at these sizes, of all expressions of sizes in the step."""
    nominal: Ints
    """The bytes of the step's storages, from these expressions."""
    bytes: Ints
    """The bytes of the problem's tensors, which may be more than those of their storages."""
    amounts: Amounts
    """The bytes, workspaces and costs of the problem."""
    traffic: Ints
    """The bytes that each op and inverse reads and writes."""


@dataclass(eq=False)
class Resizing:
    """Evaluates the known plans of a step at other sizes, between those whose problems are known. Bytes of storages are
    exact; costs, and what tensors have in addition, are interpolated."""

    problem: TrainingGraph
    """The problem at some sizes."""
    step: CapturedStep
    """The captured step at the same sizes."""
    storages: tuple[str, ...]
    """The names of the step's storages, in the order of ``nominal`` in `Corner`."""
    budget: int
    """The budget in bytes, for all sizes."""
    family: PlanFamily
    """The known plans."""
    search: Callable[[TrainingGraph, Plan], Refining | None] | None = None
    """A function that returns a search for a better plan, or None if none is needed. None if the options exclude
    searches."""
    waiting: Callable[[Schedule], Sequence[int]] | None = None
    """A function that returns, by position of a schedule, the bytes of freed gradients that are not yet added to
    earlier steps'. None if no new gradient is freed before the step ends."""
    corners: list[Corner] = field(default_factory=list)
    """The sizes at which the problem is known."""
    searches: list[Refinement] = field(default_factory=list)
    """The searches that are running."""

    def __post_init__(self) -> None:
        """Number tensors, storages, ops and inverses, since sizes and schedules are evaluated as arrays."""
        number = {name: at for at, name in enumerate(self.storages)}
        tensors = self.problem.tensors
        self._positions: TensorPositions = tensor_positions(self.problem)
        self._storage: Ints = np.array([number.get(t.name, -1) for t in tensors], dtype=np.int64)
        recipes = self.problem.recipes
        self._jumps: Flags = np.array([_has_kernels(self.step, op.name) for op in recipes], dtype=np.bool_)
        at = {t.name: k for k, t in enumerate(tensors)}
        self._made_from = {
            at[t]: [at[r] for r in op.reads if r in at]
            for op in self.problem.ops
            for t in op.writes
            if self._storage[at[t]] < 0
        }
        self._number = {op.name: r for r, op in enumerate(recipes)}
        self._number_of_free = {name: -1 - t for t, name in enumerate(self.problem.producer)}

    def add(self, sizes: Sequence[int], nominal: Ints, problem: TrainingGraph) -> bool:
        """Add the problem at further sizes, in place of one at the same sizes. Return False, and do not add it, if its
        ops, tensors or names differ from ``self.problem``. ``sizes``: the values of the step's expressions of sizes;
        ``nominal``: the bytes of its storages."""
        mine = self.problem
        if problem is not mine and (
            problem.structure != mine.structure
            or [t.name for t in problem.tensors] != [t.name for t in mine.tensors]
            or problem.inputs != mine.inputs
            or list(problem.op) != list(mine.op)
        ):
            return False
        bytes_ = np.array([t.bytes for t in problem.tensors], dtype=np.int64)
        corner = Corner(
            np.array(sizes, dtype=np.int64),
            nominal,
            bytes_,
            amounts_of(problem),
            self._positions.traffic(bytes_),
        )
        others = [c for c in self.corners if not np.array_equal(c.sizes, corner.sizes)]
        self.corners = ends_and_latest([*others, corner], CORNERS, lambda c: int(c.sizes.sum()))
        return True

    def key(self, schedule: Schedule) -> bytes:
        """Return a key of a schedule that depends on positions of ops and tensors, and not on their names."""
        numbers = [
            self._number[s.op] if isinstance(s, Run) else self._number_of_free[s.tensor] for s in schedule
        ]
        return np.array(numbers, dtype=np.int64).tobytes()

    def plan(self, sizes: Sequence[int], nominal: Ints) -> StepPlan | None:
        """Return the cheapest known plan that fits at certain sizes, with ``self.step``; None if no plan is known to
        fit. If ``waiting`` is None and the plan recomputes, the result has a search for a better one. ``sizes``: the
        values of the step's expressions of sizes. ``nominal``: the bytes of its storages."""
        amounts = self.amounts(np.array(sizes, dtype=np.int64), nominal)
        plan = None if amounts is None else self._best(amounts)
        if amounts is None or plan is None:
            return None
        if self.waiting is not None:
            return self._adding(plan, amounts, self.waiting)
        if not plan.estimate.reruns:  # nothing is cheaper
            return StepPlan(self.step, plan)
        search = self.search
        better = Rechoosing(
            plan,
            lambda: self._best(amounts),
            lambda found: StepPlan(self.step, found),
            self.family,
            (lambda: search(self._problem(amounts), plan)) if search else None,
            self.searches,
        )
        return StepPlan(self.step, plan, refinement=better)

    def _adding(
        self, plan: Plan, amounts: Amounts, waiting: Callable[[Schedule], Sequence[int]]
    ) -> StepPlan | None:
        """Return a plan that frees new gradients once they are added; None if gradients that wait exceed the budget."""
        resident = resident_bytes(self._problem(amounts), plan.schedule)
        late = waiting(plan.schedule)
        if any(held + more > self.budget for held, more in zip(resident, late, strict=True)):
            return None
        return StepPlan(self.step, plan, spare=(0,) * len(plan.schedule))

    def _best(self, amounts: Amounts) -> Plan | None:
        member = self.family.best(amounts, self.budget)
        if member is None:
            return None
        found = self.family.plan(self.problem, member, amounts)
        return replace(found, budget=self.budget, fingerprint=self.problem.fingerprint)

    def _problem(self, amounts: Amounts) -> TrainingGraph:
        """Return a planning problem with ``amounts``. Only the sum of the bytes of its inputs is right: the first input
        gets all of them."""
        mine = self.problem
        sizes = dict.fromkeys(mine.inputs, 0) | dict.fromkeys(mine.inputs[:1], amounts.fixed)
        sizes |= dict(zip(mine.producer, amounts.sizes.tolist(), strict=True))
        return with_amounts(mine, [sizes[t.name] for t in mine.tensors], amounts)

    def amounts(self, sizes: Ints, nominal: Ints) -> Amounts | None:
        """Return bytes, workspaces and costs of the problem at certain sizes. None if they cannot be interpolated.
        ``sizes``: the values of the step's expressions of sizes. ``nominal``: the bytes of its storages."""
        for corner in self.corners:
            if np.array_equal(corner.sizes, sizes) and np.array_equal(corner.nominal, nominal):
                return corner.amounts
        pair = self._around(sizes)
        if pair is None:
            return None
        low, high = pair
        workspaces = np.maximum(low.amounts.workspaces, high.amounts.workspaces)
        if (self._jumps & (workspaces > 0)).any():
            return None
        here = self._bytes(low, high, nominal)
        traffic = self._positions.traffic(here)
        costs = _line(low.traffic, low.amounts.costs, high.traffic, high.amounts.costs, traffic)
        workspaces = np.maximum(low.amounts.workspaces, high.amounts.workspaces)
        return self._positions.amounts(here, workspaces, costs, low.amounts.once)

    def _around(self, sizes: Ints) -> tuple[Corner, Corner] | None:
        """Return the two closest corners, with the same ops that run once, between which ``sizes`` are in every
        dimension; None without such."""
        best, pair = math.inf, None
        for one, other in combinations(self.corners, 2):
            if not np.array_equal(one.amounts.once, other.amounts.once):
                continue
            least, most = np.minimum(one.sizes, other.sizes), np.maximum(one.sizes, other.sizes)
            if np.all((least <= sizes) & (sizes <= most)) and (span := float((most - least).sum())) < best:
                best, pair = span, (one, other)
        return pair

    def _bytes(self, low: Corner, high: Corner, nominal: Ints) -> Ints:
        """Return the bytes of each tensor of the problem, interpolated between two corners and rounded up. ``nominal``:
        the bytes of the storages."""
        known = self._storage >= 0
        of_low, of_high, here = (
            np.where(known, n[self._storage], 0) for n in (low.nominal, high.nominal, nominal)
        )
        # A tensor of a storage is interpolated in the bytes that the problem adds to the storage's, others in
        # the bytes that their op reads. So 100 bytes more than 1000 and 200 more than 2000 are 150 more than 1500.
        more = _line(
            of_low, (low.bytes - of_low).astype(float), of_high, (high.bytes - of_high).astype(float), here
        )
        found: Ints = here + np.ceil(more - ROUNDING).astype(np.int64)
        for at in np.flatnonzero(~known).tolist():
            one, other = int(low.bytes[at]), int(high.bytes[at])
            if one == other:
                found[at] = one
                continue
            reads = self._made_from.get(at, [])
            a, b, x = (int(n[reads].sum()) for n in (of_low, of_high, here))
            found[at] = (
                math.ceil(one + (x - a) / (b - a) * (other - one) - ROUNDING) if a != b else max(one, other)
            )
        return found


def _line(low: Ints, at_low: Floats, high: Ints, at_high: Floats, here: Ints) -> Floats:
    """Interpolate linearly, by element, from ``low`` to ``high`` at ``here``; where equal, take the larger value."""
    span = high - low
    share = np.divide(here - low, span, out=np.ones(span.shape), where=span != 0)
    return np.where(span == 0, np.maximum(at_low, at_high), at_low + share * (at_high - at_low))


def _has_kernels(step: CapturedStep, op: str) -> bool:
    """Return whether the call ``op`` of a step chooses among kernels such that its workspace may change in jumps
    with the sizes."""
    target = str(step.call[op].target) if op in step.call else ""
    return bool(KERNELS.search(target)) and not ONE_KERNEL.search(target)
