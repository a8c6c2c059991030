"""Find, at each size of a range, which known schedule fits the budget. A larger size need not have the larger
peak, so all are evaluated.
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
    """The best schedule of a family at one size, and whether it fits the budget."""

    size: Size
    """The batch size, or the sizes of several dimensions."""
    fits: bool
    member: Member
    """The cheapest schedule that fits, or the one with the smallest peak."""
    estimate: Estimate
    """The peak and cost of ``member`` at this size."""
    base_peak: int
    """Bytes of the step without recomputation."""


@dataclass(frozen=True)
class RangeProof(Generic[Size]):
    """Whether, at each size of a range, some known schedule has a peak within ``budget`` bytes."""

    budget: int
    rows: tuple[RangeRow[Size], ...]

    @property
    def unfit(self) -> tuple[Size, ...]:
        """The sizes at which no known schedule is within the budget."""
        return tuple(row.size for row in self.rows if not row.fits)

    @property
    def holds(self) -> bool:
        """Whether, at every size of the range, at least one known schedule is within the budget."""
        return not self.unfit


def range_row(family: PlanFamily, amounts: Amounts, size: Size, budget: int) -> RangeRow[Size]:
    """Return the row of one size: the cheapest schedule within ``budget`` bytes for its amounts, or the one with the
    smallest peak if none fits."""
    found = family.best(amounts, budget)
    member = found or family.least(amounts)
    base_peak = family.members[0].estimate(amounts).peak
    return RangeRow(size, found is not None, member, member.estimate(amounts), base_peak)
