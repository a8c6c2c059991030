"""The simulator computes the resident bytes at each step of a schedule, and the schedule's cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.schedule import Run, Schedule


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator computes for a schedule."""

    peak: int
    """The most bytes during any run: resident tensors, what the run writes, and its workspace. At least the inputs'."""
    peak_at: int
    """The index in the schedule of the first run with that peak; -1 if the inputs alone have it."""
    cost: float
    """The sum over all runs, in the unit of `Op.cost`."""
    overhead: float
    """``cost`` ÷ the cost of running every op once, minus 1; 0 if that cost is 0."""
    reruns: int
    """How many runs are of an op or inverse that ran before."""


def simulate(graph: TrainingGraph, schedule: Schedule) -> Estimate:
    """Replay a schedule and return its peak, cost and overhead. ProblemError if it names an unknown op, reads or frees
    what is not resident, or writes or frees an input. Also if an op of ``never_rerun`` runs again, or an output is
    missing at the end."""
    size, recipes, inputs, once = graph.size, graph.op, set(graph.inputs), set(graph.never_rerun)
    resident = set(inputs)
    live = graph.input_bytes
    peak, peak_at = live, -1
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
                    live += size[t]
                elif t in inputs:
                    raise ProblemError(f"step {at}: {step.op!r} writes the input {t!r}")
            if live + op.workspace > peak:
                peak, peak_at = live + op.workspace, at
            costs.append(op.cost)
            runs[step.op] = runs.get(step.op, 0) + 1
            if runs[step.op] > 1 and step.op in once:
                raise ProblemError(f"step {at}: {step.op!r} runs again, but may run only once")
        else:
            t = step.tensor
            if t not in resident or t in inputs:
                raise ProblemError(
                    f"step {at}: frees {t!r}, which is {'an input' if t in inputs else 'not resident'}"
                )
            resident.remove(t)
            live -= size[t]
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
    """Return the bytes at each step of a valid schedule: those resident during a run, with its writes and workspace, or
    after a free."""
    size = graph.size
    resident = set(graph.inputs)
    live = graph.input_bytes
    series = []
    for step in schedule:
        if isinstance(step, Run):
            op = graph.op[step.op]
            fresh = [t for t in op.writes if t not in resident]
            resident.update(fresh)
            live += sum(size[t] for t in fresh)
            series.append(live + op.workspace)
        else:
            resident.discard(step.tensor)
            live -= size[step.tensor]
            series.append(live)
    return series
