"""Rows of the inverse table for ops that only copy or move numbers: the recomputed bits are exact."""

from __future__ import annotations

import torch

from rematplan.runtime.graph.captured_step import Call, Ref
from rematplan.runtime.inversion.row_types import Facts, Found, Undone, fits, result


def copied(call: Call, facts: Facts) -> Found:
    """Yield the rule for a copy: copy the result. Nothing if the copy loses precision, or changes device or shape."""
    x, y = call.arguments()["self"], result(call, facts)
    if not isinstance(x, Ref):
        return
    a, b = facts.value(x).fake, y.fake
    if a.shape == b.shape and a.device == b.device and (a.dtype == b.dtype or fits(x, y, facts)):
        yield Undone(x.value, (y.name,), "copy", exact=True)


def concatenated(call: Call, facts: Facts) -> Found:
    """Yield a rule for each argument of a concatenation that has the result's type: copy its slice of the result."""
    arguments, y = call.arguments(), result(call, facts)
    start = 0
    for x in arguments["tensors"]:
        fake = facts.value(x).fake
        if fake.dim() != y.fake.dim():  # cat ignores one-dimensional empty tensors
            continue
        end = start + fake.shape[arguments["dim"]]
        if fake.dtype == y.fake.dtype:
            yield Undone(x.value, (y.name,), "slice", (((arguments["dim"], start, end, 1),),), exact=True)
        start = end


def stacked(call: Call, facts: Facts) -> Found:
    """Yield a rule for each argument of a stack that has the result's type: copy its entry of the result."""
    arguments, y = call.arguments(), result(call, facts)
    for index, x in enumerate(arguments["tensors"]):
        if facts.value(x).fake.dtype == y.fake.dtype:
            yield Undone(x.value, (y.name,), "select", (arguments["dim"], index), exact=True)


def padded(call: Call, facts: Facts) -> Found:
    """Yield the rule for a padding: copy the result without it. Nothing if a padding is negative, since that crops."""
    arguments, y = call.arguments(), result(call, facts)
    x, pad = arguments["self"], arguments["pad"]
    if all(p >= 0 for p in pad):
        fake = facts.value(x).fake
        dims = [fake.dim() - 1 - i // 2 for i in range(0, len(pad), 2)]
        ranges = tuple((d, p, p + fake.shape[d], 1) for d, p in zip(dims, pad[::2], strict=True))
        yield Undone(x.value, (y.name,), "slice", (ranges,), exact=True)


def scattered(call: Call, facts: Facts) -> Found:
    """Yield the rule for the source of a slice scatter: copy the slice of the result that it was written into."""
    arguments, y = call.arguments(), result(call, facts)
    whole = y.fake.shape[arguments["dim"]]
    start = 0 if arguments["start"] is None else arguments["start"]
    end = whole if arguments["end"] is None else min(arguments["end"], whole)
    yield Undone(
        arguments["src"].value,
        (y.name,),
        "slice",
        (((arguments["dim"], start, end, arguments["step"]),),),
        exact=True,
    )


def rolled(call: Call, facts: Facts) -> Found:
    """Yield the rule that recomputes the argument of a roll: roll the result by the opposite shifts."""
    arguments, y = call.arguments(), result(call, facts)
    back = tuple(-s for s in arguments["shifts"])
    yield Undone(arguments["self"].value, (y.name,), "roll", (back, tuple(arguments["dims"])), exact=True)


def flipped(call: Call, facts: Facts) -> Found:
    """Yield the rule that recomputes the argument of a flip: flip the result along the same dimensions."""
    arguments, y = call.arguments(), result(call, facts)
    yield Undone(arguments["self"].value, (y.name,), "flip", (tuple(arguments["dims"]),), exact=True)


def shuffled(call: Call, facts: Facts) -> Found:
    """Yield the rule that recomputes the argument of a pixel shuffle: unshuffle the result."""
    arguments, y = call.arguments(), result(call, facts)
    yield Undone(
        arguments["self"].value, (y.name,), "pixel_unshuffle", (arguments["upscale_factor"],), exact=True
    )


def picked(call: Call, facts: Facts) -> Found:
    """Yield the rule for an index of one dimension by a permutation that is known before the step runs: reorder the
    result. Nothing for any other index."""
    arguments, y = call.arguments(), result(call, facts)
    x = arguments["self"]
    at = (
        {arguments["dim"]: arguments["index"]}
        if "dim" in arguments
        else dict(enumerate(arguments["indices"]))
    )
    at = {dim: index for dim, index in at.items() if index is not None}
    if len(at) != 1:
        return
    ((dim, index),) = at.items()
    order, shape = facts.known(index.value), facts.value(x).fake.shape
    if order is None or order.dtype != torch.int64 or order.dim() != 1 or shape != y.fake.shape:
        return
    if torch.equal(torch.sort(order % shape[dim]).values, torch.arange(shape[dim], device=order.device)):
        yield Undone(x.value, (y.name, index.value), "reorder", (dim,), exact=True)
