"""Silencing of torch's log messages about errors that this package catches and reports itself, in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("torch._subclasses.fake_tensor",)  # prints a traceback for every op that fails on fakes


@contextmanager
def quiet() -> Iterator[None]:
    """Disable, inside the block, those loggers of torch (`LOGGERS`) that print a traceback for errors which this
    package catches and reports itself."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, state in zip(loggers, before, strict=True):
            logger.disabled = state
