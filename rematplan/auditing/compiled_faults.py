"""Tell faults of a compiled step from those that it has in eager mode, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rematplan.auditing.compiled import compiled_anew, in_eager_mode
from rematplan.auditing.faults import Fault, StepDifferences, differences, of_compiler
from rematplan.auditing.step_runs import Results, Step, results_of

REDRAWN = "activation_memory_budget lets the backward draw random numbers again"
SHARE = 0.1
"""Another run explains a difference if it differs by at least this share of it; rounding differs by less."""


def faults_of_compiled(
    step: Step, found: StepDifferences, expected: Sequence[Results], at: int, draws: bool
) -> tuple[list[Fault], list[str]]:
    """Return faults and notes if the results that differ after a step are right in eager mode; else none. ``at``: the
    position of the step in ``expected``, the plain results. ``draws``: whether it draws random numbers."""

    sizes = {d.name: d.relative for d in found.tensors}

    # Whether a result that differs here also differs between ``right`` and ``own``, by a tenth of that or more.
    def as_wrong(right: Sequence[Results], own: Sequence[Results]) -> bool:
        between = differences(right[at], own[at])
        return any(not d.relative <= SHARE * sizes.get(d.name, math.inf) for d in between.tensors) or bool(
            between.others.keys() & found.others.keys()
        )

    if as_wrong(expected, results_of(step, in_eager_mode)):
        return [], []
    if not draws:
        return [of_compiler(found)], []
    with compiled_anew(without_budget=True):
        full = results_of(step)
        if as_wrong(expected, full):
            return [of_compiler(found)], []
    # Which numbers are drawn again depends on who draws them: PyTorch, as in the comparison, or Inductor.
    with compiled_anew():
        own = results_of(step, step.wrapped)
    with compiled_anew(without_budget=True):
        kept = results_of(step, step.wrapped)
    if as_wrong(kept, own):
        advice = (
            "set it to 1 for what draws, and checkpoint parts by torch.utils.checkpoint, or plan the step"
        )
        return [of_compiler(found, REDRAWN, advice)], []
    return [], [f"with torch._inductor.config.fallback_random, {REDRAWN}; without it, as here, it does not"]
