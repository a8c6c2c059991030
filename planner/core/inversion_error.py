"""Predict the relative error of each tensor that a schedule recovers by inverses.

A first run has error 0. An inverse's result has gain × (largest error read) + noise; a repeated op passes
errors on. The error of F(z) in x = y − F(z) is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from rematplan.ir import Op, TrainingGraph, UsageError
from rematplan.ir.recoverable import last_forward_read, recoveries
from rematplan.planner.core.schedule import Free, Schedule


def stated_limit(inverses: bool | float) -> float | None:
    """Return the largest relative error of a recovered tensor that the option ``inverses`` states; None if it is true
    or false, and so states none."""
    return None if isinstance(inverses, bool) else inverses


ROUNDING = 0.15
"""The root mean square relative error that one inverse adds, in units of half the last place. It is less than
two roundings, since errors of different sign cancel along a chain. Measured on chains of 6 to 96
couplings. `Op.noise` is a multiple of it."""


WITHIN = 30.0
"""The safety factor of `gradient_error` and `forward_error`."""


def gradient_error(error: float) -> float:
    """Return the predicted relative L2 error of a gradient: 30·√``error``, at most 0.5. ``error``: the largest relative
    error of a recovered tensor."""
    # A share ``error`` of a ReLU's arguments changes sides, and their gradients are wrong: √error in the
    # norm. 30 is a safety factor; small tensors may exceed it (RevNet-38 of width 8, batch 4: 3.8e-2 for
    # 7.3e-3).
    return min(WITHIN * math.sqrt(error), 0.5)


def forward_error(rounding: float) -> float:
    """Return the predicted relative L2 error of a forward's results: 30·``rounding``. ``rounding``: half the distance
    from 1 to the next number of the results' type."""
    # Results depend smoothly on tensors, even at a ReLU's kink. A RevNet-38 in float32 (6.0e-8) differed by
    # 1.5e-7.
    return WITHIN * rounding


def error_after(recipe: Op, inverse: bool, worst: float) -> float:
    """Return the predicted relative error of what an op writes if the largest relative error of what it reads is
    ``worst``. ``inverse``: whether ``recipe`` is an inverse."""
    if inverse:
        return recipe.gain * worst + recipe.noise
    passed = recipe.gain * worst
    # A type with the rounding step g (noise): a share d/g of differences d crosses a boundary, and becomes g.
    # The root mean square is √(d·g).
    return max(passed, math.sqrt(passed * recipe.noise))


def predicted_errors(graph: TrainingGraph, schedule: Schedule) -> dict[str, float]:
    """Return, by tensor name, the largest predicted relative error that the tensor has at any step of the schedule.
    Tensors whose error is always 0 are absent."""
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
    """Return the largest predicted relative error of a forward op's tensor during a schedule; 0 without
    inexact inverses.
    """
    forward = {t for op in graph.ops if op.phase != "backward" for t in op.writes}
    return max((e for t, e in predicted_errors(graph, schedule).items() if t in forward), default=0.0)


def inverses_run(graph: TrainingGraph, runs: Iterable[str]) -> int:
    """Return how many of ``runs`` are runs of inverses. ``runs``: names of ops and inverses, repeats included."""
    names = {op.name for op in graph.inverses}
    return sum(run in names for run in runs)


def own_limit(inverse: Op) -> float:
    """Return the default limit of an inverse's relative error: u^(2/3) for unit roundoff u, so that a third of the
    digits may be lost."""
    # 1.5e-5 for float32, 2.3e-11 for float64, 1.6e-2 for bfloat16.
    return float((inverse.noise / max(inverse.gain, 1.0) / ROUNDING) ** (2 / 3))


def with_anchors(graph: TrainingGraph, limit: float | None = None) -> TrainingGraph:
    """Return the problem without inexact inverses of anchors: tensors whose predicted relative error would exceed
    ``limit`` (None: `own_limit` of the coarsest type in the recovery). Errors add up along chains of inverses, from 0
    after an anchor. `UsageError` unless ``limit`` is positive."""
    if limit is not None and not limit > 0:
        raise UsageError(f"the largest inversion error is {limit:g}; it must be positive")
    if not any(inverse.noise for inverse in graph.inverses):
        return graph
    found = recoveries(graph)
    last_read = last_forward_read(graph)
    error: dict[str, float] = {}
    grain: dict[str, float] = {}  # the largest limit of the types involved in a tensor's recovery
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
        # Errors add up along chains of inverses. An anchor is kept or recomputed, and the chain begins again
        # at 0.
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
