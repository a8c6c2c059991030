"""Silence what torch logs of errors that are caught and said in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("torch._subclasses.fake_tensor",)  # prints the traceback of every op that does not fit


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, those loggers drop everything."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, state in zip(loggers, before, strict=True):
            logger.disabled = state
