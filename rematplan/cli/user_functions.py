"""Load a function of the user's, ``package.module:function``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rematplan.ir import UsageError, first_line


def user_function(name: str) -> Callable[..., Any]:
    """Return the function ``package.module:function``; `UsageError` if there is none. The present folder is added to
    ``sys.path``."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(f"{name!r} is not of the form package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # of any kind, in the user's module
        raise UsageError(
            f"{name}: {type(error).__name__}: {first_line(error)}; write package.module:function"
        ) from error
    if not callable(found):
        raise UsageError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]
