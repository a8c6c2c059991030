"""A lock for looking at modules: several threads at once, or a single one that captures a module and
temporarily replaces its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident


class CaptureLock:
    """A reentrant lock that either any number of threads hold together (`shared`), to look at modules, or one thread
    holds exclusively (`alone`), to capture one."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._sharing: dict[int, int] = {}  # thread → how often it holds the lock
        self._alone: int | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Run the block while no other thread holds the lock exclusively. Other threads may run such blocks at the
        same time."""
        me = get_ident()
        with self._changed:
            if self._alone not in (None, me):  # tested first, since every call comes here
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
        """Run the block while no other thread holds the lock, neither exclusively nor shared. A thread that holds it
        shared may call this: it releases its share while it waits."""
        me = get_ident()
        with self._changed:
            # Give up the shared lock while waiting, so that two threads that share it can both wait for `alone`. That
            # is safe: this thread looks at nothing meanwhile, and a capture restores everything.
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
