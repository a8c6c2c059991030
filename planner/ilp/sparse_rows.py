"""A mixed-integer program as a sparse matrix, independent of any solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Term = tuple[int, float]


@dataclass
class Rows:
    """A mixed-integer program under construction: minimise Σ cⱼ xⱼ subject to rows Σ aⱼ xⱼ ≥ b, with all variables xⱼ
    between 0 and 1.

    ``cost``: the factor cⱼ of each variable. ``integers``: for each variable, whether it must be 0 or 1. Row r has the
    variables ``columns[s:e]`` with the factors ``factors[s:e]``, where s is ``starts[r]`` and e is ``starts[r + 1]``;
    its right-hand side b is ``floors[r]``. ``constant``: to be added to the cost of a solution. ``impossible``: True if
    it is known that no solution exists. A solver gets neither ``constant`` nor ``impossible``; those who build the
    program use them.
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
        """Add a variable with the factor ``cost`` in the objective, and return its number. Its value is 0 or 1; if
        ``integer`` is False, any number from 0 to 1."""
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
"""Numbers that are used in place of a variable's number if the variable's value is known: `ZERO` for 0, `ONE` for 1."""


def is_set(values: Sequence[float], variable: int) -> bool:
    """Return whether a 0-1 variable is 1 in a solution.

    ``values``: the solution, one value for each variable. ``variable``: the variable's number; `ZERO` or `ONE` for a
    variable that is known to be 0 or 1.
    """
    return variable == ONE or (variable != ZERO and values[variable] > 0.5)
