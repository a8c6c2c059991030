"""The errors that a person can act on, each with the exit status the command line gives it."""

from __future__ import annotations

from typing import Any, Literal


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


class ProcessEnded(RematplanError):
    """Another process of a distributed run has ended, or cannot be reached."""


class LatticeTooLarge(RematplanError):
    """A graph with more lower sets than a strategy may enumerate."""

    def __init__(self, strategy: str, seen: int, limit: int) -> None:
        self.seen, self.limit = seen, limit
        super().__init__(
            f"{strategy}: the graph has more than {limit} lower sets ({seen} found so far); "
            f"try --strategy approx_dp, which needs one lower set per op"
        )


Known = Literal["least", "searched", "proven"]
"""What is known of a refused budget: the smallest peak is the least of all that the strategy can give; or of what its
search has met so far; or no plan whatever fits the budget."""

_REFUSED: dict[Known, str] = {
    "least": "is below the smallest peak it can reach, {}",
    "searched": "is below the smallest peak it has found, {}; in more time it may find a smaller one",
    "proven": "is proven to be too small for any plan; the smallest peak it has found is {}",
}


class InfeasibleBudget(RematplanError):
    """No schedule known to the strategy fits the budget.

    Attributes:
        strategy: its name.
        budget: the budget asked for, bytes.
        smallest: the smallest peak that the strategy is known to reach, bytes.
        known: what that says.
        floor: what no plan can have less than, and why, in words; empty if not said.
        hint: what may have been meant instead, in words; empty if not said.
        plan: the plan of that smallest peak, where the strategy has one at hand; else None.
    """

    exit_status = 3
    _FIELDS = ("strategy", "budget", "smallest", "known", "floor", "hint", "plan")

    def __init__(
        self,
        strategy: str,
        budget: int,
        smallest: int,
        known: Known = "least",
        floor: str = "",
        hint: str = "",
        plan: Any = None,
    ) -> None:
        self.strategy, self.budget, self.smallest = strategy, budget, smallest
        self.known, self.floor, self.hint, self.plan = known, floor, hint, plan
        reason = _REFUSED[known].format(f"{show_bytes(smallest)} ({smallest} bytes)")
        super().__init__(
            f"{strategy}: budget {show_bytes(budget)} ({budget} bytes) {reason}"
            + (f"; no plan can have less than {floor}" if floor else "")
            + (f"; {hint}" if hint else "")
        )

    def changed(self, **fields: Any) -> InfeasibleBudget:
        """The same refusal but for these attributes, such as ``hint="..."``."""
        own = {name: getattr(self, name) for name in self._FIELDS}
        return InfeasibleBudget(**(own | fields))

    def __reduce__(self) -> Any:
        """Pickled by its attributes: by default an exception is made anew of its text alone."""
        return type(self), tuple(getattr(self, name) for name in self._FIELDS)


def show_bytes(n: float) -> str:
    """``n`` bytes for a person, in binary units: ``1.20 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"
