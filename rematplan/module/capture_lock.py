"""A lock for modules: any number of threads read their state, or one captures, which replaces tensors meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Condition, RLock, get_ident


class CaptureLock:
    """A reentrant lock that any number of threads share (`shared`), or one has exclusively (`alone`)."""

    def __init__(self) -> None:
        self._lock = RLock()  # entered itself: a condition's ``with`` takes four times as long
        self._changed = Condition(self._lock)
        self._waiting = 0  # the number of threads that wait for a change
        self._sharing: dict[int, int] = {}  # thread → how often it holds the lock
        self._alone: int | None = None
        self._shared = _SharedMode(self)

    def shared(self) -> AbstractContextManager[None]:
        """A context in which no other thread has the lock exclusively; several threads may be in it."""
        return self._shared

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the lock for itself, as it has while it captures or plans a module."""
        return self._alone == get_ident()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other thread has the lock in any mode. A shared lock of this thread is given up
        meanwhile."""
        me = get_ident()
        with self._lock:
            # Give up the shared lock while waiting, so that two threads that share it can both wait for `alone`. That
            # is safe: this thread looks at nothing meanwhile, and a capture restores everything.
            mine = self._sharing.pop(me, 0)
            self._tell()
            self._wait(lambda: self._alone == me or (self._alone is None and not self._sharing))
            before, self._alone = self._alone, me
        try:
            yield
        finally:
            with self._lock:
                self._alone = before
                if mine:
                    self._sharing[me] = mine
                self._tell()

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._waiting += 1
        try:
            self._changed.wait_for(condition)
        finally:
            self._waiting -= 1

    def _tell(self) -> None:
        if self._waiting:
            self._changed.notify_all()


class _SharedMode:
    """The context manager of `CaptureLock.shared`. Every call of a planned module enters it twice, and a class takes
    half the time of a generator."""

    def __init__(self, lock: CaptureLock) -> None:
        self._of = lock

    def __enter__(self) -> None:
        of, me = self._of, get_ident()
        with of._lock:
            if of._alone not in (None, me):
                of._wait(lambda: of._alone in (None, me))
            of._sharing[me] = of._sharing.get(me, 0) + 1

    def __exit__(self, *_raised: object) -> None:
        of, me = self._of, get_ident()
        with of._lock:
            of._sharing[me] -= 1
            if not of._sharing[me]:
                del of._sharing[me]
            of._tell()


LOCK = CaptureLock()
"""The lock of all planned modules and captures of this process."""
