"""Which member of a family fits at each size of a range: a table that is computed at every size, not at the largest.

A larger size need not have the larger peak, nor need a plan that fits at both ends fit between them: at some sizes
kernels need more workspace, and which op is at the peak changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rematplan.planner.core.simulator import Estimate
from rematplan.planner.family.amounts_by_position import Amounts
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.planner.family.schedule_by_position import Member

Size = TypeVar("Size")


@dataclass(frozen=True)
class RangeRow(Generic[Size]):
    """What a family of plans offers at one size of the batch.

    ``size``: the size, or the sizes of several dimensions. ``fits``: whether a member is within the budget.
    ``member``: the cheapest member that fits, else the one with the smallest peak. ``estimate``: its peak and cost
    at this size. ``base_peak``: bytes, the peak of the step without recomputation.
    """

    size: Size
    fits: bool
    member: Member
    estimate: Estimate
    base_peak: int


@dataclass(frozen=True)
class RangeProof(Generic[Size]):
    """What a family of plans offers at each size of a range (``rows``), within ``budget`` bytes."""

    budget: int
    rows: tuple[RangeRow[Size], ...]

    @property
    def unfit(self) -> tuple[Size, ...]:
        """The sizes at which no member of the family is within the budget."""
        return tuple(row.size for row in self.rows if not row.fits)

    @property
    def holds(self) -> bool:
        """Whether at every size some member of the family is within the budget."""
        return not self.unfit


def range_row(family: PlanFamily, amounts: Amounts, size: Size, budget: int) -> RangeRow[Size]:
    """Return the cheapest member of a family that is within ``budget`` bytes at one size, or the member with the
    smallest peak if none is.

    ``amounts``: the sizes of tensors, workspaces and costs at this size. ``size``: recorded in the result.
    """
    found = family.best(amounts, budget)
    member = found or family.least(amounts)
    base_peak = family.members[0].estimate(amounts).peak
    return RangeRow(size, found is not None, member, member.estimate(amounts), base_peak)
