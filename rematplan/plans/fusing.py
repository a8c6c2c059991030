"""The option ``kernels``: a step in which regions of ops are one compiled kernel each."""

from __future__ import annotations

from rematplan.plans.splitting import RewrittenStep
from rematplan.runtime.fuse.fuse import fuse
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.warn import warn


def with_fused_kernels(step: CapturedStep) -> RewrittenStep:
    """Return the step with fused kernels. If some regions have none, one warning says how many, and why the first."""
    found = fuse(step)
    if found.failures:
        warn(
            f"{step.name}: {len(found.failures)} of {found.regions} regions run eager kernels, since they have no "
            f"fused kernel that may be used: {found.failures[0]}"
        )
    return RewrittenStep(found.step, (found.note,) if found.kernels else ())
