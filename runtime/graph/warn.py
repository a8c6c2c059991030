"""Warnings that point at the user's line, however many frames of this package and of torch lie below it."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

SKIPPED = frozenset({"rematplan", "torch", "contextlib"})
"""Top-level names of modules whose frames are not the user's. Blocks of ours are entered and left by contextlib."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning whose place is the first frame outside of this package, of torch and of generated code.

    ``stacklevel`` would count frames, whose number changes with each refactoring and each release of torch.
    """
    frame = _first_outside(sys._getframe(1))
    variables = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        variables.get("__name__") or "<unknown>",
        variables.setdefault("__warningregistry__", {}),
    )


def _first_outside(frame: FrameType) -> FrameType:
    """The nearest frame, from this one outwards, that is the user's; the outermost if none is."""
    while not _is_users(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    """It goes by the name of the frame's module: the package's files lie behind links, so that one has several paths.
    Generated code is run without such a name, or with that of builtins."""
    name = frame.f_globals.get("__name__") or "builtins"
    return name != "builtins" and name.partition(".")[0] not in SKIPPED
