"""Explain the peak of a plan: which kinds of tensors are resident at the peak, and why no schedule has a much lower
one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rematplan.ir import TrainingGraph, show_bytes
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.bounds.cut_bounds import PeakBound, min_peak_bound
from rematplan.planner.core.plan import Plan, peak_op
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.planner.core.simulator import simulate

ACTIVATIONS, GRADIENTS, WORKSPACE, INPUTS = "activations", "gradients", "workspace", "inputs"


def peak_split(graph: TrainingGraph, schedule: Schedule, at: int | None = None) -> dict[str, int]:
    """Return the bytes resident at step ``at`` of a schedule, or at its peak if ``at`` is None, by kind of tensor.
    Kinds: those of inputs that the problem states, other inputs (absent if 0), activations, gradients, and
    workspace."""
    graph = infer_phases(graph)
    at = simulate(graph, schedule).peak_at if at is None else at
    live = {INPUTS: graph.input_bytes - sum(graph.fixed_split.values())} | dict(graph.fixed_split)
    live |= {ACTIVATIONS: 0, GRADIENTS: 0, WORKSPACE: 0}
    resident: set[str] = set()
    for step in schedule[: at + 1]:
        if isinstance(step, Run):
            resident.update(graph.op[step.op].writes)
        else:
            resident.discard(step.tensor)
    for tensor in resident:
        backward = graph.ops[graph.producer[tensor]].phase == "backward"
        live[GRADIENTS if backward else ACTIVATIONS] += graph.size[tensor]
    if at >= 0 and isinstance(last := schedule[at], Run):
        live[WORKSPACE] = graph.op[last.op].workspace
    return {kind: n for kind, n in live.items() if n or kind != INPUTS}


@dataclass(frozen=True, slots=True)
class Transients:
    """The bytes that an op needs while it runs, without inputs of the problem."""

    op: str
    """The name of the op."""
    reads: int
    """Bytes of what it reads."""
    writes: int
    """Bytes of what it writes and does not read."""
    workspace: int

    @property
    def total(self) -> int:
        """The bytes of reads, writes and workspace together."""
        return self.reads + self.writes + self.workspace

    def __str__(self) -> str:
        parts = {"reads": self.reads, "writes": self.writes, "workspace": self.workspace}
        shares = " + ".join(f"{what} {show_bytes(n)}" for what, n in parts.items())
        return f"op {self.op!r} ({shares} = {self.total} bytes)"


def transients(graph: TrainingGraph, op: str) -> Transients:
    """Return the bytes that one op or inverse reads, writes and has as workspace, without inputs of the problem.
    ``op``: its name."""
    row, inputs = graph.op[op], set(graph.inputs)
    reads = set(row.reads) - inputs
    return Transients(
        op,
        sum(graph.size[t] for t in reads),
        sum(graph.size[t] for t in set(row.writes) - inputs - reads),
        row.workspace,
    )


@dataclass(frozen=True, slots=True)
class PeakCause:
    """What a plan's peak consists of (``inputs``, ``at``, ``others``), and a lower bound of any schedule's peak."""

    inputs: int
    at: Transients | None
    """The op at the peak; None if no op needs more than the inputs."""
    others: int
    """Bytes resident at the peak that the op there neither reads nor writes, inputs excluded."""
    floor: PeakBound
    """The proven lower bound."""
    floor_at: Transients | None
    """The op from which it follows; None if it follows from inputs and outputs or a search."""

    def rows(self) -> dict[str, str]:
        """Return the parts of the peak and the lower bound as rows of a table for readers: for each label, the text."""
        position = "the inputs" if self.at is None else str(self.at)
        return {
            "the peak is at": position,
            "inputs": f"{show_bytes(self.inputs)} ({self.inputs} bytes)",
            "held across it": f"{show_bytes(self.others)} ({self.others} bytes)",
            "proven least": _floor_text(self.floor, self.floor_at),
        }

    def document(self) -> dict[str, Any]:
        """Return the parts of the peak and the lower bound as plain JSON data, in bytes."""
        return {
            "inputs": self.inputs,
            "at": None if self.at is None else asdict(self.at),
            "others": self.others,
            "floor": self.floor.bytes,
            "floor_at": None if self.floor_at is None else asdict(self.floor_at),
        }


def peak_cause(graph: TrainingGraph, plan: Plan) -> PeakCause:
    """Return what the plan's peak consists of, and a proven lower bound of the peak of any schedule of this problem."""
    name, floor = peak_op(plan), min_peak_bound(graph)
    at = None if name is None else transients(graph, name)
    others = plan.estimate.peak - graph.input_bytes - (at.total if at else 0)
    return PeakCause(
        graph.input_bytes, at, others, floor, None if floor.op is None else transients(graph, floor.op)
    )


def floor_text(graph: TrainingGraph) -> str:
    """Return text that states a lower bound of any schedule's peak, and why."""
    floor = min_peak_bound(graph)
    return _floor_text(floor, None if floor.op is None else transients(graph, floor.op))


def _floor_text(floor: PeakBound, at: Transients | None) -> str:
    because = "what the end holds" if at is None else f"{at} in addition to the inputs"
    if floor.searched:
        because = "proven by a search over all orders of execution"
    return f"{show_bytes(floor.bytes)} ({floor.bytes} bytes): {because}"
