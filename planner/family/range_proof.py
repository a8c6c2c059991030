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
    """What a family offers at a size.

    ``fits``: whether a member fits. ``member``: the cheapest that does, else the one of the smallest peak.
    ``estimate``: its peak and cost there. ``base_peak``: bytes of the step without recomputation.
    """

    size: Size
    fits: bool
    member: Member
    estimate: Estimate
    base_peak: int


@dataclass(frozen=True)
class RangeProof(Generic[Size]):
    """The rows of all sizes of a range, within ``budget`` bytes."""

    budget: int
    rows: tuple[RangeRow[Size], ...]

    @property
    def unfit(self) -> tuple[Size, ...]:
        """The sizes at which no member fits."""
        return tuple(row.size for row in self.rows if not row.fits)

    @property
    def holds(self) -> bool:
        """Whether some member fits at every size."""
        return not self.unfit


def range_row(family: PlanFamily, amounts: Amounts, size: Size, budget: int) -> RangeRow[Size]:
    """Return what a family offers at one size, whose amounts are given."""
    found = family.best(amounts, budget)
    member = found or family.least(amounts)
    base_peak = family.members[0].estimate(amounts).peak
    return RangeRow(size, found is not None, member, member.estimate(amounts), base_peak)
