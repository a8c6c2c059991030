"""The line of a model's code that runs or that has failed, for messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import FrameType

ABOVE = "rematplan.runtime.capture.flat_module"
"""The module that calls a model's forward while it is traced."""
LIBRARIES = ("torch", "sympy", "contextlib", "rematplan.runtime")


def code_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of a model's forward outside of `LIBRARIES`, as ``line 12 of model.py``. Empty if there
    is none, or if `ABOVE`, which calls the forward, is not in ``frames``. ``frames``: the innermost first, as
    `traceback.walk_stack` yields them."""
    found = ""
    for frame, line in frames:
        module = str(frame.f_globals.get("__name__", ""))
        if module == ABOVE:
            return found
        if not found and not any(f"{module}.".startswith(f"{library}.") for library in LIBRARIES):
            found = f"line {line} of {Path(frame.f_code.co_filename).name}"
    return ""
