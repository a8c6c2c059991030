"""Who may look at modules: any number of threads at once, or one alone that captures a module, while other tensors
stand in its places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident


class CaptureLock:
    """A lock that threads share, or that one has alone. Whoever has it may take it again, in either way."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._sharing: dict[int, int] = {}  # how many times, by thread
        self._alone: int | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A block in which no other thread captures."""
        me = get_ident()
        with self._changed:
            if self._alone not in (None, me):  # asked before, for this block is in every call
                self._changed.wait_for(lambda: self._alone in (None, me))
            self._sharing[me] = self._sharing.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing[me] -= 1
                if not self._sharing[me]:
                    del self._sharing[me]
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which no other thread looks or captures."""
        me = get_ident()
        with self._changed:
            # While it waits it looks at nothing, and who captures leaves all as it was: two that share may both wait.
            mine = self._sharing.pop(me, 0)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alone == me or (self._alone is None and not self._sharing))
            before, self._alone = self._alone, me
        try:
            yield
        finally:
            with self._changed:
                self._alone = before
                if mine:
                    self._sharing[me] = mine
                self._changed.notify_all()
