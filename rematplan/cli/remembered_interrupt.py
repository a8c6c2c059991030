"""Remember Ctrl-C. Libraries may swallow the KeyboardInterrupt that it raises, or turn it into another error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pressed = threading.Event()


@contextmanager
def remembered() -> Iterator[None]:
    """A context in which `stop_if_pressed` knows of Ctrl-C. No effect in other threads, or with another handler."""
    _pressed.clear()
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _press)
    try:
        yield
    finally:
        _pressed.clear()
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_if_pressed() -> None:
    """Raise a KeyboardInterrupt if Ctrl-C was pressed in the context `remembered`."""
    if _pressed.is_set():
        raise KeyboardInterrupt


def _press(signum: int, frame: FrameType | None) -> None:
    _pressed.set()
    signal.default_int_handler(signum, frame)
