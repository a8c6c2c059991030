"""The names of kinds of memory, and the formats of numbers, for people."""

from __future__ import annotations

from rematplan.planner.core.plan import Plan

LABELS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "batch": "batch",
    "constant": "constants",
    "tangent": "gradient of the loss",
    "rng_states": "random states",
    "old_buffers": "buffers before the step",
    "library_workspaces": "libraries",
    "inputs": "other inputs",
    "activations": "activations",
    "gradients": "gradients",
    "workspace": "workspace",
}
"""For each kind of memory that `peak_split` returns, its name in tables."""


def show_seconds(seconds: float) -> str:
    """Format a time given in seconds, with at least three digits: as seconds from 1 s upwards, as microseconds below
    1 ms, else as milliseconds."""
    if 0 < seconds < 0.001:
        return f"{1e6 * seconds:.1f} µs"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1000 * seconds:.{3 if seconds < 0.01 else 1}f} ms"


def show_share(part: float, whole: float) -> str:
    """Format ``part`` as a percentage of ``whole``, such as ``50.0 %``; a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def show_overhead(plan: Plan) -> str:
    """Format a plan's overhead (extra time as a share of the time without recomputation) as a percentage."""
    return f"{100 * plan.estimate.overhead:.2f} %"


def unit_of(n: int) -> tuple[str, int]:
    """Return the name and the size in bytes of the largest unit (GiB, MiB, KiB or B) that is not above ``n`` bytes."""
    return next(
        (unit, size)
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
        if n >= size or size == 1
    )
