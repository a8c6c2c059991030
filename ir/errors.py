"""The errors that a user can act on. Each error class has the exit status with which the command line then ends."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

LONGEST = 4000
"""The largest number of characters of a message. Of a longer message, the first half and the last half of this number
are shown."""


class RematplanError(Exception):
    """Base class of every error that a user's input or budget causes, as opposed to a bug in rematplan.

    The message is one line: what is wrong, where, the figures, what to try. ``exit_status``: the status with which
    the command line ends when the error reaches it.
    """

    exit_status = 2

    def __init__(self, message: object = "") -> None:
        # Names from a file may contain line breaks, or be very long; the message must stay one line that can be read.
        line = " ".join(str(message).splitlines())
        super().__init__(
            line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
        )


class ProblemError(RematplanError):
    """A planning problem, plan or pipeline that is not valid: it violates its format or contradicts itself (cycle,
    double write, negative size, ...)."""


class ModelError(RematplanError):
    """A model file that cannot be read, or a model that contains something rematplan cannot run."""


class NotCaptured(ModelError):
    """A model whose training step cannot be captured as a graph. Some of its modules may be."""


class CapturedAnew(NotCaptured):
    """A model that can be captured, but has another graph in so many calls that each would take the time of a
    capture."""


class NoGradients(ModelError):
    """A call of a model of which no output depends on a trainable parameter: it has no training step to plan."""


class UsageError(RematplanError):
    """An option or argument that does not fit the model or the problem."""


class ProcessEnded(RematplanError):
    """Another process of a distributed run has ended, or cannot be reached from this one."""


class LatticeTooLarge(RematplanError):
    """The forward graph has more lower sets (sets of ops that contain all ancestors of their members) than a
    strategy may enumerate."""

    def __init__(self, strategy: str, seen: int, limit: int) -> None:
        self.seen, self.limit = seen, limit
        super().__init__(
            f"{strategy}: the graph has more than {limit} lower sets ({seen} found so far); "
            f"try --strategy approx_dp, which needs one lower set per op"
        )


class UnfitSizes(RematplanError):
    """For some sizes in a requested range (of batch sizes, for example), no known plan fits the memory budget."""

    exit_status = 3


Known = Literal["least", "searched", "proven", "room"]
"""What is known about a budget that is refused as too small.

``least``: the strategy has no plan with a smaller peak than the smallest peak found. ``searched``: a longer search may
find a plan with a smaller peak. ``proven``: no schedule at all fits the budget. ``room``: no schedule fits if memory
is reserved for a loss that is computed outside of the model. The loss may need less memory than is reserved.
"""

_REFUSED: dict[Known, str] = {
    "least": "is below the smallest found, {}; this strategy has no smaller plan",
    "searched": "is below the smallest found, {}; with a larger time limit a smaller one may be found",
    "proven": "is proven to be too small for any plan; the smallest found is {}",
    "room": "is too small with the room for a loss outside of the model; the smallest found is {}",
}


CHEAP = 0.05
"""The overhead (extra time ÷ time without recomputation) up to which a plan counts as cheap. The message of a refused
budget also names a budget for which there is a cheap plan."""


@dataclass(eq=False, repr=False)
class InfeasibleBudget(RematplanError):
    """The memory budget is refused: no schedule that the strategy found has a peak within it."""

    exit_status = 3
    strategy: str
    """The name of the strategy, the algorithm that searched for a plan."""
    budget: int
    """The budget that was asked for, in bytes."""
    smallest: int
    """The smallest peak of all plans that the searches found, in bytes."""
    known: Known = "least"
    """Why the budget is refused: ``"least"``, the strategy has no smaller plan; ``"searched"``, a longer search may
    find one; ``"proven"``, no schedule fits; ``"room"``, none fits with the memory reserved for a loss."""
    floor: str = ""
    """A proven lower bound of every plan's peak, with the reason, as text; empty if unknown."""
    hint: str = ""
    """What the user may have meant instead, as text; empty if there is no suggestion."""
    plan: Any = None
    """The plan whose peak is ``smallest``, if there is one; else None."""
    cheap: int = 0
    """The smallest peak in bytes of the plans found that need at most 5 % (`CHEAP`) more time than a step without
    recomputation; 0 if unknown."""
    cheap_plan: Any = None
    """The plan whose peak is ``cheap``, if there is one; else None."""
    near: tuple[tuple[int, float], ...] = ()
    """Pairs of a peak in bytes and the overhead of the cheapest plan found there, from ``smallest`` to 1.2 times it;
    empty if unknown."""

    def __post_init__(self) -> None:
        """Compose the message from the fields."""
        reason = _REFUSED[self.known].format(_exactly(self.smallest))
        super().__init__(
            f"{self.strategy}: budget {_exactly(self.budget)} {reason}"
            + (
                f"; a plan that costs at most {100 * CHEAP:.0f} % of time needs {_exactly(self.cheap)}"
                if self.cheap
                else ""
            )
            + (f"; of the plans found near the smallest, {_costs(self.near)}" if len(self.near) > 1 else "")
            + (f"; the proven least is {self.floor}" if self.floor else "")
            + (f"; {self.hint}" if self.hint else "")
        )

    @property
    def plans(self) -> tuple[Any, ...]:
        """The plans of the peaks ``smallest`` and ``cheap``, as far as there are any."""
        return tuple(dict.fromkeys(p for p in (self.plan, self.cheap_plan) if p is not None))

    def __reduce__(self) -> Any:
        """Return what pickle needs: all attributes. By default an exception is restored from its message alone."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


def _exactly(n: int) -> str:
    return f"{show_bytes(n)} ({n} bytes)"


def _costs(near: tuple[tuple[int, float], ...]) -> str:
    return ", ".join(f"{show_bytes(peak)} costs {100 * overhead:.1f} %" for peak, overhead in near)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def show_bytes(n: float) -> str:
    """Format ``n`` bytes for a reader, in binary units up to GiB, such as ``1.20 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"
