"""The rows of an integer program, independent of any solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Term = tuple[int, float]


@dataclass
class Rows:
    """A mixed-integer program under construction: variables between 0 and 1, rows Σ aⱼ xⱼ ≥ b, a cost to minimise.

    ``cost``: of each variable. ``integers``: for each variable, whether it must be 0 or 1. Row r has the variables
    ``columns[starts[r] : starts[r + 1]]`` with the factors ``factors[...]`` and the right-hand side ``floors[r]``.
    ``constant``: added to the cost. ``impossible``: whether some row cannot hold.
    """

    cost: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    constant: float = 0.0
    impossible: bool = False

    def variable(self, cost: float, integer: bool = True) -> int:
        """Add a variable with this cost and return its number. Its value is 0 or 1 or, if ``integer`` is False, any
        number between them."""
        self.cost.append(cost)
        self.integers.append(integer)
        return len(self.cost) - 1

    def at_least(self, terms: Iterable[Term], floor: float) -> None:
        """Add the row Σ factor · variable ≥ ``floor``. ``terms``: pairs (variable, factor)."""
        for column, factor in terms:
            self.columns.append(column)
            self.factors.append(factor)
        self.starts.append(len(self.columns))
        self.floors.append(floor)


ZERO, ONE = -1, -2
"""Used in place of a variable's number if its value is known to be 0, or 1."""


def is_set(values: Sequence[float], variable: int) -> bool:
    """Return whether a variable is 1 in a solution. ``values``: the solution. ``variable``: its number, or `ZERO` or
    `ONE` for a known value."""
    return variable == ONE or (variable != ZERO and values[variable] > 0.5)
