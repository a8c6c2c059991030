"""Explain a plan's peak: what is held at it, by kind, and what limits it."""

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


def peak_split(graph: TrainingGraph, schedule: Schedule) -> dict[str, int]:
    """Return the bytes resident at a schedule's peak by kind; they sum to the peak.

    The kinds are those into which the problem divides its inputs (parameters, buffers, batch, ...), ``inputs`` for
    inputs without a kind, ``activations`` (written by forward ops), ``gradients`` (written by backward ops), and
    ``workspace`` of the op that runs at the peak.
    """
    graph = infer_phases(graph)
    at = simulate(graph, schedule).peak_at
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
    """The bytes that an op needs while it runs, in addition to the problem's inputs.

    ``op``: its name. ``reads``: bytes of the tensors it reads. ``writes``: bytes of those it writes and does not
    read. ``workspace``: bytes.
    """

    op: str
    reads: int
    writes: int
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
    """Return the bytes that the op or inverse named ``op`` reads, writes and has as workspace, inputs of the problem
    left out."""
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
    """Why a plan's peak is as high as it is: the peak is ``inputs`` + what the op at the peak needs + ``others``.

    ``inputs``: bytes of the problem's inputs. ``at``: the bytes that the op at the peak reads, writes and has as
    workspace; None if no run needs more than the inputs. ``others``: bytes of tensors that are resident during that
    op without being read or written. ``floor``: the proven least: a lower bound of any schedule's peak.
    ``floor_at``: the bytes that the op which is the reason for this bound reads, writes and has as workspace; None
    if inputs and outputs are the reason.
    """

    inputs: int
    at: Transients | None
    others: int
    floor: PeakBound
    floor_at: Transients | None

    def rows(self) -> dict[str, str]:
        """Return the causes as text for a table: names and values."""
        position = "the inputs" if self.at is None else str(self.at)
        return {
            "the peak is at": position,
            "inputs": f"{show_bytes(self.inputs)} ({self.inputs} bytes)",
            "held across it": f"{show_bytes(self.others)} ({self.others} bytes)",
            "proven least": _floor_text(self.floor, self.floor_at),
        }

    def document(self) -> dict[str, Any]:
        """Return the causes as plain JSON data."""
        return {
            "inputs": self.inputs,
            "at": None if self.at is None else asdict(self.at),
            "others": self.others,
            "floor": self.floor.bytes,
            "floor_at": None if self.floor_at is None else asdict(self.floor_at),
        }


def peak_cause(graph: TrainingGraph, plan: Plan) -> PeakCause:
    """Return what makes up the plan's peak, and the proven least: a lower bound of any schedule's peak."""
    name, floor = peak_op(plan), min_peak_bound(graph)
    at = None if name is None else transients(graph, name)
    others = plan.estimate.peak - graph.input_bytes - (at.total if at else 0)
    return PeakCause(
        graph.input_bytes, at, others, floor, None if floor.op is None else transients(graph, floor.op)
    )


def floor_text(graph: TrainingGraph) -> str:
    """Return, as part of a message, the proven least (a lower bound of any schedule's peak) and the op that is the
    reason for it."""
    floor = min_peak_bound(graph)
    return _floor_text(floor, None if floor.op is None else transients(graph, floor.op))


def _floor_text(floor: PeakBound, at: Transients | None) -> str:
    because = "what the end holds" if at is None else f"{at} in addition to the inputs"
    return f"{show_bytes(floor.bytes)} ({floor.bytes} bytes): {because}"
