"""Where rematplan keeps files between processes: plans and measured costs."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Return the user's cache folder for rematplan.

    On Linux this is ``$XDG_CACHE_HOME/rematplan``, by default ``~/.cache/rematplan``. The folder may not exist yet.
    """
    return Path(platformdirs.user_cache_dir("rematplan", appauthor=False))
