"""Find, for each batch size of a range, which of several known schedules fits a budget of bytes.

Every size is evaluated, not only the largest: a larger size need not have the larger peak. A schedule that fits at the
smallest and the largest size need not fit at the sizes between them, because kernels need more workspace at some sizes,
and the op at the peak changes with the size.
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
    """The result for one batch size: the best schedule of a family, and whether it fits the budget. A family is a set
    of schedules of one problem structure that can be evaluated at any size.

    ``size``: the batch size, or the sizes of several dimensions. ``fits``: whether any schedule of the family is within
    the budget. ``member``: the cheapest schedule that fits, or the schedule with the smallest peak if none fits.
    ``estimate``: the peak and cost of ``member`` at this size. ``base_peak``: the peak in bytes, at this size, of the
    step without recomputation.
    """

    size: Size
    fits: bool
    member: Member
    estimate: Estimate
    base_peak: int


@dataclass(frozen=True)
class RangeProof(Generic[Size]):
    """The results for a range of batch sizes: whether, at each size, at least one of several known schedules has a peak
    within ``budget`` bytes. ``rows``: the result for each size."""

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
    """Return the cheapest schedule of a family whose peak is within ``budget`` bytes at one size, or the schedule with
    the smallest peak if none fits.

    ``family``: schedules of one problem structure, evaluated at any size. ``amounts``: the sizes of tensors, the
    workspaces and the costs at this size. ``size``: only copied to the result.
    """
    found = family.best(amounts, budget)
    member = found or family.least(amounts)
    base_peak = family.members[0].estimate(amounts).peak
    return RangeRow(size, found is not None, member, member.estimate(amounts), base_peak)
