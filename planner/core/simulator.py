"""The one simulator: what a schedule holds, step by step, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.schedule import Run, Schedule


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator says of a schedule.

    ``peak``: bytes, inputs included, the largest over its runs of (resident before) ∪ (writes) plus workspace.
    ``peak_at``: the step at which the peak stands, -1 if the schedule runs nothing. ``cost``: the sum over its runs.
    ``overhead``: cost ÷ the cost of running every op once, − 1. ``reruns``: runs beyond an op's first.
    """

    peak: int
    peak_at: int
    cost: float
    overhead: float
    reruns: int


def simulate(graph: TrainingGraph, schedule: Schedule) -> Estimate:
    """Replay a schedule.

    Raises:
        ProblemError: a step reads or frees what is not resident, writes or frees an input, runs again what may not, or
            an output is lost.
    """
    size, recipes, inputs, once = graph.size, graph.op, set(graph.inputs), set(graph.never_rerun)
    resident = set(inputs)
    held = graph.input_bytes
    peak, peak_at = held, -1
    costs: list[float] = []
    runs: dict[str, int] = {}
    for at, step in enumerate(schedule):
        if isinstance(step, Run):
            op = recipes.get(step.op)
            if op is None:
                raise ProblemError(f"step {at}: no op or inverse named {step.op!r}")
            for t in op.reads:
                if t not in resident:
                    raise ProblemError(f"step {at}: {step.op!r} reads {t!r}, which is not resident")
            for t in op.writes:
                if t not in resident:
                    resident.add(t)
                    held += size[t]
                elif t in inputs:
                    raise ProblemError(f"step {at}: {step.op!r} writes the input {t!r}")
            if held + op.workspace > peak:
                peak, peak_at = held + op.workspace, at
            costs.append(op.cost)
            runs[step.op] = runs.get(step.op, 0) + 1
            if runs[step.op] > 1 and step.op in once:
                raise ProblemError(f"step {at}: {step.op!r} runs again, which it never may")
        else:
            t = step.tensor
            if t not in resident or t in inputs:
                raise ProblemError(
                    f"step {at}: frees {t!r}, which is {'an input' if t in inputs else 'not resident'}"
                )
            resident.remove(t)
            held -= size[t]
    for t in graph.outputs:
        if t not in resident:
            raise ProblemError(f"at the end the output {t!r} is not resident")
    cost = math.fsum(costs)
    return Estimate(
        peak=peak,
        peak_at=peak_at,
        cost=cost,
        overhead=cost / graph.base_cost - 1 if graph.base_cost else 0.0,
        reruns=sum(n - 1 for n in runs.values()),
    )


def resident_bytes(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """Bytes at each step of a valid schedule: while a run is under way (workspace included), after a free."""
    size = graph.size
    resident = set(graph.inputs)
    held = graph.input_bytes
    series = []
    for step in schedule:
        if isinstance(step, Run):
            op = graph.op[step.op]
            fresh = [t for t in op.writes if t not in resident]
            resident.update(fresh)
            held += sum(size[t] for t in fresh)
            series.append(held + op.workspace)
        else:
            resident.discard(step.tensor)
            held -= size[step.tensor]
            series.append(held)
    return series
