"""The errors that a person can act on, each with the exit status the command line gives it."""

from __future__ import annotations


class RematplanError(Exception):
    """Base of every error that is the input's fault, or the budget's, and not a bug of ours.

    The message is one line: what is wrong, where, the figures, what to try.
    """

    exit_status = 2

    def __init__(self, message: object = "") -> None:
        # names from a file may hold line breaks; the message stays one line all the same
        super().__init__(" ".join(str(message).splitlines()))


class ProblemError(RematplanError):
    """A planning problem or plan that breaks its format's rules (cycle, double write, negative size, ...)."""


class ModelError(RematplanError):
    """A model file that cannot be read, or that says something rematplan cannot run."""


class UsageError(RematplanError):
    """An option or argument that does not fit the model or the problem."""


class LatticeTooLarge(RematplanError):
    """A graph with more lower sets than a strategy may enumerate."""

    def __init__(self, strategy: str, seen: int, limit: int) -> None:
        self.seen, self.limit = seen, limit
        super().__init__(
            f"{strategy}: the graph has more than {limit} lower sets ({seen} found so far); "
            f"try --strategy approx_dp, which needs one lower set per op"
        )


class InfeasibleBudget(RematplanError):
    """No schedule known to the strategy fits the budget.

    Attributes:
        strategy: its name.
        budget: the budget asked for, bytes.
        smallest: the smallest peak that the strategy is known to reach, bytes.
        floor: what no plan can have less than, and why, in words; empty if not said.
    """

    exit_status = 3

    def __init__(self, strategy: str, budget: int, smallest: int, floor: str = "") -> None:
        self.strategy, self.budget, self.smallest, self.floor = strategy, budget, smallest, floor
        super().__init__(
            f"{strategy}: budget {show_bytes(budget)} ({budget} bytes) is below the smallest peak it can reach, "
            f"{show_bytes(smallest)} ({smallest} bytes)"
            + (f"; no plan can have less than {floor}" if floor else "")
        )


def show_bytes(n: float) -> str:
    """``n`` bytes for a person, in binary units: ``1.20 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"
