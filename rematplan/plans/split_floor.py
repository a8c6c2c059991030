"""A lower bound of the peak of every plan of a step, whichever of its regions are split, into however many parts."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import Op, TrainingGraph, show_bytes
from rematplan.planner.arrays.precedence import precedence
from rematplan.planner.bounds.cut_bounds import PeakBound
from rematplan.runtime.costs.roofline import distinct_bytes
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.in_place_calls import IN_PLACE
from rematplan.runtime.split.regions import SplitRegion, StepUse


def split_floor(step: CapturedStep, graph: TrainingGraph, regions: Sequence[SplitRegion]) -> PeakBound:
    """Return a lower bound of the peak of every plan of ``step``, whichever ``regions``, all that can be split, are
    split. ``graph``: the problem without splits. Only needed ops outside of the regions and the tensors of the
    end are counted. Of tensors made in regions only what is read counts; where memory may be reused, results or
    workspace do not."""
    split = {name for region in regions for name in region.calls}
    in_parts = {storage for name in split for storage in step.writes(step.call[name])}
    # What only gradients of weights depend on may be computed in the memory of an operand.
    use = StepUse(step)
    in_place = {c.name for c in step.calls if c.target in IN_PLACE and use.of_weights.issuperset(c.made)}
    inputs, needed = set(graph.inputs), precedence(graph).needed
    floor = PeakBound(graph.input_bytes + sum(graph.size[t] for t in {*graph.outputs} - inputs), None)
    for at, op in enumerate(graph.ops):
        if needed >> at & 1 and op.name not in split:
            made, sums = in_parts & set(op.reads), op.name in in_place
            whole = {*op.reads, *(() if sums else op.writes)} - inputs - in_parts
            bytes_ = sum(graph.size[t] for t in whole) + sum(_needed(step, graph, op, t) for t in made)
            # Its workspace may be smaller in place, or if an operand that was joined has other strides.
            bytes_ += 0 if made or sums else op.workspace
            if graph.input_bytes + bytes_ > floor.bytes:
                floor = PeakBound(graph.input_bytes + bytes_, op.name)
    return floor


def floor_text(floor: PeakBound) -> str:
    """Return text that states the bound, and why."""
    why = (
        "what the end holds"
        if floor.op is None
        else f"op {floor.op!r}, which cannot be split, and the inputs"
    )
    return f"{show_bytes(floor.bytes)} ({floor.bytes} bytes) whatever is split: {why}"


def _needed(step: CapturedStep, graph: TrainingGraph, op: Op, storage: str) -> int:
    """Return how many bytes an op needs at least of a tensor of which it may read a view: the rest need not exist."""
    if op.name not in step.call:
        return graph.size[storage] if storage in graph.outputs else 0
    read = [step.values[name] for name in step.call[op.name].operands]
    return max(min(graph.size[storage], distinct_bytes(v.fake)) for v in read if v.storage == storage)
