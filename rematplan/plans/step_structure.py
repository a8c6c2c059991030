"""The structure of captured steps: what is equal for steps of several sizes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from rematplan.runtime.execute.in_place import operands_to_overwrite
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.tracked_sizes import without_values


def structure_of(step: CapturedStep) -> Hashable:
    """Return a key that is equal for two captured steps if one compiled source, which takes sizes as argument,
    serves both."""
    calls: list[Any] = [
        (
            *(c.name, c.results, c.single, c.is_view, c.seeded, c.backward, c.late, without_values(c.target)),
            *(without_values(c.args), without_values(dict(c.kwargs))),
        )
        for c in (*step.calls, *step.inverses)
    ]
    values = tuple((v.name, v.storage, v.call, v.fake.dtype, v.fake.device) for v in step.values.values())
    ends = step.inputs, step.outputs, step.attributes, step.left_out, step.arrived
    return tuple(calls), values, ends, operands_to_overwrite(step)
