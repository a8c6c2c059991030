"""How much a search may do: CPU seconds or moves. A busy machine's wall clock only ends a search that is far
too late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PATIENCE, SHORTEST_PATIENCE = 4.0, 10.0
"""A search of counted seconds ends when the wall clock shows this multiple of them, but not before this many seconds.
"""
MOVES_PER_SECOND = 150_000
"""The moves that count as one second, by which constants in seconds become moves."""
SLICE = 0.2
"""Seconds of annealing between two readings of the clock."""
MOVES_IN_SLICE = 4000
"""Moves of annealing between two readings of the clock: at first, and always if moves are counted instead of seconds.
"""
FEWEST_MOVES = 200
"""The smallest number of moves between two readings of the clock, if seconds are counted."""


def _goes_on() -> bool:
    return False


class Effort:
    """The work that a search may do and has done: CPU seconds of its thread, or moves if ``moves`` is not 0. A move is
    a random change of a schedule, or other work that takes about as long. ``ended``: returns whether the search must
    end early. ``parent``: the effort of which this one is a part, which ends this one and counts its work. If moves are
    counted and ``seconds`` is infinite, no clock ends the search, so the result is the same on each machine. Otherwise
    the wall clock ends it as `PATIENCE` says."""

    def __init__(
        self,
        seconds: float = math.inf,
        moves: int = 0,
        *,
        ended: Callable[[], bool] = _goes_on,
        parent: Effort | None = None,
    ) -> None:
        self.seconds, self.moves, self.total = seconds, moves, float(moves) if moves else seconds
        self.ended, self.parent = ended, parent
        self.done = 0
        """The moves made so far."""
        self.slice_ = MOVES_IN_SLICE
        """The number of moves until the clock is read again."""
        self.interrupted: BaseException | None = None
        """The exception by which Ctrl-C or a progress callback ended the search or a part of it."""
        self._stopped = False
        self._more: float | None = None
        self._elsewhere = 0.0  # CPU seconds of processes that the search waited for
        self.begin()

    def begin(self) -> None:
        """Count from now on: the CPU seconds of the current thread, and the wall clock."""
        self._began = time.thread_time()
        longest = max(PATIENCE * self.seconds, SHORTEST_PATIENCE)
        self._latest = time.monotonic() + longest if self.parent is None else math.inf

    def spent(self) -> float:
        """Return the work done: moves if moves are counted, else CPU seconds; all of ``total`` if the search is
        `cut_short`. Applies an `extend` made since the last call. Only the thread that does the work may call this."""
        if self.cut_short:
            return self.total
        done = float(self.done) if self.moves else time.thread_time() - self._began + self._elsewhere
        if self._more is not None:
            self.total, self._more = done + self._more, None
        return done

    @property
    def cut_short(self) -> bool:
        """Whether the search must end although its effort may not be spent. Any thread may read this."""
        late = self._latest < math.inf and time.monotonic() > self._latest
        return self._stopped or late or self.ended() or (self.parent is not None and self.parent.cut_short)

    @property
    def left(self) -> float:
        """The moves or seconds that are left, at least 0."""
        spent = self.spent()  # may change the total
        return max(0.0, self.total - spent)

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.spent() >= self.total

    @property
    def share_spent(self) -> float:
        """The part of the effort that is spent, from 0 to 1."""
        return min(1.0, self.spent() / self.total) if self.total else 1.0

    def part(self, amount: float, ended: Callable[[], bool] = _goes_on) -> Effort:
        """Return an effort of ``amount`` moves or seconds, but at most what is left. Its work counts as this one's,
        too."""
        amount = max(0.0, min(amount, self.left))
        return self._of_amount(amount, ended, self)

    def like(self, share: float, most: float = math.inf) -> Effort:
        """Return a further effort, whose work does not count as this one's: ``share`` times the whole of this one, but
        at most ``most`` seconds."""
        return self._of_amount(min(share * self.total, self.of(most)))

    def _of_amount(
        self, amount: float, ended: Callable[[], bool] = _goes_on, parent: Effort | None = None
    ) -> Effort:
        if self.moves:
            return Effort(moves=max(1, int(amount)), ended=ended, parent=parent)
        return Effort(amount, ended=ended, parent=parent)

    def of(self, seconds: float) -> float:
        """Return a constant in seconds in the unit of this effort."""
        return seconds * MOVES_PER_SECOND if self.moves else seconds

    def charge(self, *, moves: int = 0, seconds: float = 0.0) -> None:
        """Count work that `spent` does not see: moves, or CPU seconds of another process."""
        self.done += moves
        self._elsewhere += seconds
        if self.parent is not None:
            self.parent.charge(moves=moves, seconds=seconds)

    def interrupt(self, interrupt: BaseException) -> None:
        """Record the exception that ended this search, here and in the searches that it is a part of."""
        self.interrupted = interrupt
        if self.parent is not None:
            self.parent.interrupt(interrupt)

    def stop(self) -> None:
        """Make the search end soon, by counting all its effort as spent. Another thread may call this."""
        self._stopped = True

    def extend(self, amount: float) -> None:
        """Let the search go on for ``amount`` from now, whatever its limit was. Another thread may call this."""
        self._more = amount

    def shortest_round(self, ops: int, shortest: tuple[float, float]) -> float:
        """Return the length of an annealing search's shortest cooling for ``ops`` ops, in moves or seconds, as this
        effort counts. ``shortest``: the moves per op, and the number of ops at which these double."""
        moves = shortest[0] * ops * (1 + ops / shortest[1]) + 1000
        return moves if self.moves else moves / (2 * MOVES_PER_SECOND)

    @property
    def rate(self) -> float:
        """The estimated number of moves per unit of the effort."""
        return 1.0 if self.moves else self.slice_ / SLICE

    def next_slice(self, left: float) -> int:
        """Return the number of moves to make before the clock is read again. If moves are counted, it is at most
        ``left``, but at least 1."""
        return max(1, min(self.slice_, int(left) if self.moves else self.slice_))

    def made(self, moves: int, seconds: float) -> None:
        """Count ``moves`` moves that took ``seconds``. If seconds are counted, the next slice is adapted to their
        speed; it at most doubles."""
        self.charge(moves=moves)
        if not self.moves:
            self.slice_ = max(FEWEST_MOVES, min(2 * self.slice_, int(moves * SLICE / max(seconds, 1e-6))))
