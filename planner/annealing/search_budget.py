"""What a search by annealing may spend: seconds, or a number of moves."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from rematplan.planner.annealing.annealer import compile_annealer

SLICE = 0.2
"""Seconds of annealing between two looks at the clock."""
MOVES_IN_SLICE = 4000
"""Moves of annealing between two looks at the clock: at first, and always if moves are counted instead of seconds."""
FEWEST_MOVES = 200
"""The fewest moves between two looks at the clock, if seconds count."""
MOVES_A_SECOND = 300_000
"""The assumed speed of the annealer, by which the shortest round is converted to seconds."""


@dataclass
class SearchBudget:
    """What a search by annealing may spend: seconds, or a number of moves if ``moves`` is not 0, and what it has
    spent.

    With moves, the result of the search is the same on every machine. ``done``: moves made so far. ``began``: when
    the search began, by the monotonic clock. ``slice_``: moves until the clock is read again. ``interrupted``:
    whether Ctrl-C ended the search.
    """

    seconds: float
    moves: int = 0
    done: int = 0
    began: float = field(default_factory=lambda: _started())
    slice_: int = MOVES_IN_SLICE
    interrupted: bool = False

    @property
    def total(self) -> float:
        """Everything that may be spent: moves if they are counted, otherwise seconds."""
        return float(self.moves) if self.moves else self.seconds

    def spent(self) -> float:
        """Return what has been spent so far: moves if they are counted, otherwise seconds."""
        return float(self.done) if self.moves else time.monotonic() - self.began

    def shortest_round(self, ops: int, shortest: tuple[float, float]) -> float:
        """Return the length of the shortest round of annealing, in moves if they are counted, otherwise in seconds.

        ``ops``: the number of ops. ``shortest``: the moves per op in small problems, and the number of ops at which
        a round has twice as many per op.
        """
        moves = shortest[0] * ops * (1 + ops / shortest[1]) + 1000
        return moves if self.moves else moves / MOVES_A_SECOND

    def stop(self) -> None:
        """Count all seconds as spent, so that the search soon ends. It has no effect if moves are counted. May be
        called from another thread."""
        self.began = -math.inf

    @property
    def rate(self) -> float:
        """The estimated number of moves per unit of the budget: per second, or 1 if moves are counted."""
        return 1.0 if self.moves else self.slice_ / SLICE

    def next_slice(self, left: float) -> int:
        """Return the number of moves to make before the clock is read again, at least 1.

        ``left``: what is left to spend, in seconds or moves; it limits the result only if moves are counted.
        """
        return max(1, min(self.slice_, int(left) if self.moves else self.slice_))

    def made(self, moves: int, seconds: float) -> None:
        """Record that ``moves`` moves were made in ``seconds``. If seconds are counted, the number of moves until
        the next look at the clock is adjusted to that speed."""
        self.done += moves
        if not self.moves:
            self.slice_ = max(FEWEST_MOVES, min(2 * self.slice_, int(moves * SLICE / max(seconds, 1e-6))))


def _started() -> float:
    """Return the time at which a search's clock starts: after its loops are compiled."""
    compile_annealer()
    return time.monotonic()
