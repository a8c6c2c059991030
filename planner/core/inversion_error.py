"""Predict the relative error of every tensor that a schedule recovers by inverses.

The result of a tensor's first run has error 0 by definition. An inverse's result has the error ``gain`` × (largest
error among its reads) + ``noise``. If an op runs again on inexact tensors, it rounds as in its first run, so it only
passes their error on. An exception is an op that rounds to a coarser type, because rounding can increase small
errors. Let d be a relative difference below the type's relative rounding step g (``noise``). A share d/g of the
values crosses a rounding boundary, and their error becomes g. The root mean square error is then √(d·g).

Examples: in a chain of k additive couplings each inverse adds one rounding, about k in total. A coupling scaled by γ
also multiplies the error by 1/γ. For an inverse that computes x from y = x + F(z), the error of F(z) is not modelled.
The prediction is right within a small factor where |F(x)| and its slope are about as large as |x|.
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
"""What an inverse adds to the relative error, as a multiple of half a unit in the last place. `Op.noise` is a
multiple of it."""


WITHIN = 30.0
"""The safety factor of `gradient_error` and `forward_error`."""


def gradient_error(error: float) -> float:
    """Return the predicted relative error (L2 norm) of a gradient if the tensors that inverses recover have the
    relative error ``error``: 30·√``error``, at most 0.5.

    Where the network is smooth, a gradient has about the same relative error as the tensors it is computed from. But
    a ReLU or maximum has a kink: a share of about ``error`` of its arguments is so close to the kink that they change
    sides, and their gradients are entirely wrong. These contribute √``error`` to the norm. The factor 30 is a safety
    factor. In tensors of few elements, a single argument that changes sides contributes more: a RevNet-38 of width 8
    with a batch of 4 differed by 3.8e-2, where 7.3e-3 is predicted.
    """
    return min(WITHIN * math.sqrt(error), 0.5)


def forward_error(rounding: float) -> float:
    """Return the predicted relative error (L2 norm) of results of a forward, such as losses, if its ops round otherwise
    than another forward's: 30·``rounding``.

    These results depend smoothly on the tensors that they are computed from, even at the kink of a ReLU. The factor 30
    is a safety factor: a RevNet-38 in float32 (a rounding of 6.0e-8) differed by 1.5e-7.

    ``rounding``: half the distance between 1 and the next larger number of the type.
    """
    return WITHIN * rounding


def error_after(recipe: Op, inverse: bool, worst: float) -> float:
    """Return the predicted relative error of the tensors that an op or inverse writes.

    For an inverse it is gain · worst + noise. For an op that runs again it is gain · worst, but at least √(gain ·
    worst · noise), because rounding to a coarser type can increase small errors.
    """
    if inverse:
        return recipe.gain * worst + recipe.noise
    passed = recipe.gain * worst
    return max(passed, math.sqrt(passed * recipe.noise))


def predicted_errors(graph: TrainingGraph, schedule: Schedule) -> dict[str, float]:
    """Return, by tensor name, the largest predicted relative error that a tensor has during a schedule.

    Errors come from inverses, which recover tensors only approximately. Tensors whose predicted error is always 0 are
    absent.
    """
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
    """Return the largest predicted relative error that a tensor written by a forward op has during a schedule. It is
    0 if the schedule runs no inverse that rounds."""
    forward = {t for op in graph.ops if op.phase != "backward" for t in op.writes}
    return max((e for t, e in predicted_errors(graph, schedule).items() if t in forward), default=0.0)


def inverses_run(graph: TrainingGraph, runs: Iterable[str]) -> int:
    """Return how many of ``runs`` are runs of inverses. ``runs``: names of ops and inverses, repeats included."""
    names = {op.name for op in graph.inverses}
    return sum(run in names for run in runs)


def own_limit(inverse: Op) -> float:
    """Return the default limit of the relative error of a tensor that an inverse recovers: u^(2/3) for a type with
    unit roundoff u.

    With this limit a third of the type's digits may be lost: it is 1.5e-5 for float32, 2.3e-11 for float64 and 1.6e-2
    for bfloat16. The unit roundoff is computed from the ``noise`` and ``gain`` of the inverse.
    """
    return float((inverse.noise / max(inverse.gain, 1.0) / ROUNDING) ** (2 / 3))


def with_anchors(graph: TrainingGraph, limit: float | None = None) -> TrainingGraph:
    """Return the problem without those inverses with which the predicted relative error of a tensor would exceed a
    limit.

    An inverse can read a tensor that another inverse recovered, so errors add up along chains of inverses, from the
    end of the forward half to its beginning. If the error of a recovered tensor exceeds the limit, the inexact
    inverses that write it are removed. A plan must then keep or recompute this tensor, called an *anchor*, and the
    error of the chain begins again at 0. Inverses whose own rounding exceeds the limit are removed as well; exact
    inverses (``noise`` 0) never are.
    """
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
