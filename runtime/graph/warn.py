"""Warnings that point at the user's line, however many frames of this package and of torch are on the stack."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

SKIPPED = frozenset({"rematplan", "torch", "contextlib"})
"""Top-level names of modules whose frames are not the user's. contextlib is among them because it enters and
leaves the context managers of this package."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: that of the innermost frame outside this package, torch, contextlib and generated code,
    else of the outermost frame."""
    # A fixed ``stacklevel`` would count frames, whose number changes with each release of torch.
    frame = _users_frame(sys._getframe(1))
    variables = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        variables.get("__name__") or "<unknown>",
        variables.setdefault("__warningregistry__", {}),
    )


def _users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame, from ``frame`` outwards, that runs the user's code; the outermost frame if none
    does."""
    while not _is_users(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame's module has a name and is not of this package, torch, contextlib or builtins."""
    # Not by paths, since the package's folders are symbolic links. Generated code has no module name, or that
    # of builtins.
    name = frame.f_globals.get("__name__") or "builtins"
    return name != "builtins" and name.partition(".")[0] not in SKIPPED
