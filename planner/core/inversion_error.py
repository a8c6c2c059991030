"""What inversion does to the numbers: the relative error of every tensor that a schedule brings back, predicted.

A tensor's first run is exact by definition: its error is 0. An inverse gives ``gain`` × (the largest error among what
it reads) + ``noise``. An op that runs again on inexact tensors gives as large an error, for it repeats its own
roundings bit by bit; only one that rounds to a coarser type may give a larger: of relative differences d below that
type's grain g (``noise``) some cross a rounding boundary and become g, a root of the mean square of √(d·g).

So additive couplings add their rounding once an inverse (a chain of k blocks: about k roundings) and a coupling scaled
by γ multiplies by 1/γ as well. What F does to an error beside the sum is not in the model: it is right within a factor
of a few where |F(x)| and its slope are like |x|.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from rematplan.ir import Op, TrainingGraph, UsageError
from rematplan.ir.recoverable import last_forward_read, recoveries
from rematplan.planner.core.schedule import Free, Schedule

ROUNDING = 0.15
"""What an inverse adds to an error, in units of half the last place (`Op.noise` is this times that)."""


WITHIN = 30.0
"""Gradients may be this many times as wrong as the root of what the tensors are that they are computed from."""


def gradient_error(error: float) -> float:
    """The largest relative error (L2, of a gradient) to be expected where tensors come back with a relative ``error``.

    Where all is smooth a gradient is as wrong as what it is computed from. But a share d of a ReLU's arguments, or of a
    maximum's, lies so near its kink that an error of d puts them on the other side, where their gradients are wrong
    altogether: √d of the norm.
    """
    return min(WITHIN * math.sqrt(error), 0.5)


def error_after(recipe: Op, inverse: bool, worst: float) -> float:
    """The relative error of what a recipe writes, given the largest of what it reads."""
    if inverse:
        return recipe.gain * worst + recipe.noise
    passed = recipe.gain * worst
    return max(passed, math.sqrt(passed * recipe.noise))


def predicted_errors(graph: TrainingGraph, schedule: Schedule) -> dict[str, float]:
    """The largest relative error that each tensor has on the way, of those that are ever inexact."""
    inverses = {op.name for op in graph.inverses}
    now: dict[str, float] = {}
    worst: dict[str, float] = {}
    for step in schedule:
        if isinstance(step, Free):
            continue
        recipe = graph.op[step.op]
        read = max((now.get(t, 0.0) for t in recipe.reads), default=0.0)
        error = error_after(recipe, recipe.name in inverses, read)
        for t in recipe.writes:
            now[t] = error
            if error > worst.get(t, 0.0):
                worst[t] = error
    return worst


def worst_error(graph: TrainingGraph, schedule: Schedule) -> float:
    """The largest of `predicted_errors` among the forward's tensors; 0 for a plan that runs no inexact inverse."""
    forward = {t for op in graph.ops if op.phase != "backward" for t in op.writes}
    return max((e for t, e in predicted_errors(graph, schedule).items() if t in forward), default=0.0)


def inverses_run(graph: TrainingGraph, runs: Iterable[str]) -> int:
    """How many of the runs are inverses."""
    names = {op.name for op in graph.inverses}
    return sum(run in names for run in runs)


def own_limit(inverse: Op) -> float:
    """The default for the largest error: u^(2/3) for numbers rounded at u, which leaves a third of their digits.

    1.5e-5 for float32, 2.3e-11 for float64, 1.6e-2 for bfloat16; an inverse says u by its noise.
    """
    return float((inverse.noise / max(inverse.gain, 1.0) / ROUNDING) ** (2 / 3))


def with_anchors(graph: TrainingGraph, limit: float | None = None) -> TrainingGraph:
    """The problem without the inverses by which a chain of them would become too wrong.

    The chains are followed from the end of the forward half backwards. Where the predicted error of a tensor exceeds
    ``limit`` (a relative error; by default `own_limit` of the coarsest type on its way back), its inverses are taken
    away: a plan has to keep it, or to compute it again, and the chain begins there anew at 0.

    Raises:
        UsageError: a limit that is not positive.
    """
    if limit is not None and not limit > 0:
        raise UsageError(f"the largest inversion error is {limit:g}; it must be positive")
    if not any(inverse.noise for inverse in graph.inverses):
        return graph
    found = recoveries(graph)
    last_read = last_forward_read(graph)
    error: dict[str, float] = {}
    grain: dict[str, float] = {}  # the coarsest limit of the types that a tensor's way back goes through
    anchors: set[str] = set()
    for target in sorted(found, key=lambda t: last_read[t], reverse=True):
        here, coarse = dict(error), dict(grain)
        for recipe in found[target].steps:
            worst = max((here.get(t, 0.0) for t in recipe.reads), default=0.0)
            result = error_after(recipe, recipe.phase is None, worst)
            here.update(dict.fromkeys(recipe.writes, result))
            type_ = own_limit(recipe) if recipe.phase is None else (recipe.noise / 2) ** (2 / 3)
            type_ = max(type_, *(coarse.get(t, 0.0) for t in recipe.reads), 0.0)
            coarse.update(dict.fromkeys(recipe.writes, type_))
        most = coarse[target] if limit is None else limit
        if here[target] > most and found[target].inverse.noise:
            anchors.add(target)
        else:
            error[target], grain[target] = here[target], coarse[target]
    kept = tuple(
        r
        for r in graph.inverses
        if not r.noise
        or (anchors.isdisjoint(r.writes) and r.noise <= (own_limit(r) if limit is None else limit))
    )
    return replace(graph, inverses=kept)
