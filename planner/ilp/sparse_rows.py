"""A mixed-integer program as a sparse matrix, independent of any solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Term = tuple[int, float]


@dataclass
class Rows:
    """A mixed-integer program under construction: minimise Σ cⱼ xⱼ with rows Σ aⱼ xⱼ ≥ b and 0 ≤ xⱼ ≤ 1."""

    cost: list[float] = field(default_factory=list)
    """cⱼ of each variable."""
    starts: list[int] = field(default_factory=lambda: [0])
    """Row r has the entries ``starts[r]`` to ``starts[r + 1]`` − 1 of ``columns`` (variables) and ``factors``."""
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    """The right-hand side b of each row."""
    integers: list[bool] = field(default_factory=list)
    """For each variable, whether it must be 0 or 1."""
    constant: float = 0.0
    """To be added to a solution's cost. Solvers do not get it."""
    impossible: bool = False
    """Whether it is known that no solution exists. Solvers do not get it."""

    def variable(self, cost: float, integer: bool = True) -> int:
        """Add a variable with the cost ``cost`` and return its number: 0 or 1, or between them if not ``integer``."""
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
    """Return whether a variable (a number, `ZERO` or `ONE`) is 1 in a solution."""
    return variable == ONE or (variable != ZERO and values[variable] > 0.5)
