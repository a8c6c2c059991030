"""The user's cache folder for plans and measured costs. A cache file that cannot be read or written is no error."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

import platformdirs

from rematplan.ir.errors import ProblemError
from rematplan.ir.files import read_json, write_whole

LOG = logging.getLogger("rematplan")


def cache_folder() -> Path:
    """Return the user's cache folder for rematplan.

    On Linux this is ``$XDG_CACHE_HOME/rematplan``, by default ``~/.cache/rematplan``. The folder may not exist yet.
    """
    return Path(platformdirs.user_cache_dir("rematplan", appauthor=False))


def read_cached(file: Path) -> object:
    """Return the JSON data of a cache file; None if it does not exist or is damaged, which is logged."""
    if not os.path.exists(file):  # Path.exists raises an error where the folder may not be searched
        return None
    try:
        return read_json(file)
    except ProblemError as error:
        report_damage(file, str(error))
        return None


def write_cached(file: Path, content: str) -> bool:
    """Write a cache file completely or not at all, with missing folders. Return whether it was written; a
    failure is logged.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except (OSError, ProblemError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rpartition(": ")[2]
        log_once(f"{file.parent} cannot be written, so nothing is kept there for later processes: {reason}")
        return False
    return True


def report_damage(file: Path, reason: str) -> None:
    """Log, once per process and text, that a cache file is damaged and counts as empty."""
    log_once(f"{file} is damaged and counts as empty: {reason}")


@cache
def log_once(text: str) -> None:
    """Log ``text`` at level INFO, unless this process has logged the same text before."""
    LOG.info(text)
