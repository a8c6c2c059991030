"""The effort that a search for plans by simulated annealing may spend: a time in seconds, or a number of moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rematplan.planner.annealing.annealer import compile_annealer

SLICE = 0.2
"""Seconds of annealing between two readings of the clock."""
MOVES_IN_SLICE = 4000
"""Moves of annealing between two readings of the clock: at first, and always if moves are counted instead of seconds.
"""
FEWEST_MOVES = 200
"""The smallest number of moves between two readings of the clock, if seconds are counted."""
MOVES_A_SECOND = 300_000
"""The assumed number of moves per second, by which the length of the shortest round is converted from moves to seconds.
"""


@dataclass
class SearchBudget:
    """The effort that a search by simulated annealing may spend, and how much of it is spent. A move is one random
    change of the schedule.

    ``moves``: if not 0, the search may make this many moves, however long they take; then its result is the same on
    every machine. If 0, it may take ``seconds``. ``done``: the number of moves made so far. ``began``: when the search
    began, as a time of `time.monotonic`. ``slice_``: the number of moves until the clock is read again.
    ``interrupted``: the exception by which Ctrl-C or a progress callback ended the search, or None.
    ``ended``: returns whether the search should end before its effort is spent; then all of it counts as spent.
    """

    seconds: float
    moves: int = 0
    done: int = 0
    began: float = field(default_factory=lambda: _started())
    slice_: int = MOVES_IN_SLICE
    interrupted: BaseException | None = None
    ended: Callable[[], bool] = lambda: False

    @property
    def total(self) -> float:
        """The whole effort that the search may spend: a number of moves if moves are counted, else seconds."""
        return float(self.moves) if self.moves else self.seconds

    def spent(self) -> float:
        """Return the effort that the search has spent so far: a number of moves if moves are counted, else seconds."""
        if self.ended():
            return self.total
        return float(self.done) if self.moves else time.monotonic() - self.began

    def shortest_round(self, ops: int, shortest: tuple[float, float]) -> float:
        """Return the length of the shortest cooling of an annealing search: in moves if the budget counts moves, else
        in seconds.

        The length is a constant, plus moves in proportion to the number of ops. The moves per op grow with the number
        of ops.

        Args:
            ops: the number of ops of the problem.
            shortest: two numbers: the moves per op for a small problem, and the number of ops at which the moves per op
                are twice as many.
        """
        moves = shortest[0] * ops * (1 + ops / shortest[1]) + 1000
        return moves if self.moves else moves / MOVES_A_SECOND

    def stop(self) -> None:
        """Make the search end soon, by counting all its effort as spent. Another thread may call this."""
        self.ended = lambda: True

    @property
    def rate(self) -> float:
        """The estimated number of moves per unit of the budget: moves per second, or 1 if the budget counts moves."""
        return 1.0 if self.moves else self.slice_ / SLICE

    def next_slice(self, left: float) -> int:
        """Return the number of moves to make before the clock is read again, at least 1.

        ``left``: the effort that is left. If the budget counts moves, the result is at most ``left``. If it counts
        seconds, ``left`` is ignored.
        """
        return max(1, min(self.slice_, int(left) if self.moves else self.slice_))

    def made(self, moves: int, seconds: float) -> None:
        """Record that ``moves`` moves were made and took ``seconds``. If the budget counts seconds, the number of moves
        until the clock is read again is adapted to this speed; it at most doubles."""
        self.done += moves
        if not self.moves:
            self.slice_ = max(FEWEST_MOVES, min(2 * self.slice_, int(moves * SLICE / max(seconds, 1e-6))))


def _started() -> float:
    """Compile or load the annealer's loops, then return the time (`time.monotonic`). So compilation does not count as
    time of the search."""
    compile_annealer()
    return time.monotonic()
