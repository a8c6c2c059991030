"""A plan's schedule, replayed: which tensors are resident when, which op wrote them, and what runs again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run
from rematplan.planner.peak_report import ACTIVATIONS, GRADIENTS, INPUTS, WORKSPACE

RECOMPUTED = "recomputed"
"""The kind of activations that an op has written again."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One run of an op or inverse."""

    op: str
    module: str
    again: bool
    """Whether it computes again what was there before: a run after the op's first one, or an inverse."""
    start: float
    """When it begins, in microseconds since the step's begin."""
    cost: float
    workspace: int


@dataclass(frozen=True, slots=True)
class Stay:
    """A tensor from when an op writes it until it is freed."""

    tensor: str
    bytes: int
    kind: str
    first: int
    """The position of the run that writes it."""
    last: int
    """The position of the last run before it is freed; the last run of all if it is never freed."""


@dataclass(frozen=True)
class Replay:
    """A replayed schedule. Positions count runs, not frees."""

    fixed: Mapping[str, int]
    """The bytes of the inputs, which are resident during the whole step, by kind."""
    runs: tuple[Executed, ...]
    stays: tuple[Stay, ...]

    def by_kind(self) -> dict[str, list[int]]:
        """Return the resident bytes of each kind at each run; kinds without bytes are left out."""
        kinds = (ACTIVATIONS, RECOMPUTED, GRADIENTS)
        changes = {kind: [0] * (len(self.runs) + 1) for kind in kinds}
        for stay in self.stays:
            changes[stay.kind][stay.first] += stay.bytes
            changes[stay.kind][stay.last + 1] -= stay.bytes
        rows = {kind: [size] * len(self.runs) for kind, size in self.fixed.items()}
        for kind in kinds:
            live, row = 0, []
            for change in changes[kind][:-1]:
                live += change
                row.append(live)
            rows[kind] = row
        rows[WORKSPACE] = [run.workspace for run in self.runs]
        return {kind: row for kind, row in rows.items() if any(row)}

    def totals(self) -> list[int]:
        """Return the resident bytes at each run. The largest is the plan's peak, if it is above the inputs' bytes."""
        return [sum(column) for column in zip(*self.by_kind().values(), strict=True)] or [0] * len(self.runs)


def replay(graph: TrainingGraph, plan: Plan, modules: Mapping[str, str]) -> Replay:
    """Replay a plan of a problem. ``modules``: the module of each op, by the op's name, as far as known."""
    phases = {op.name: op.phase for op in infer_phases(graph).ops}
    inverses = {op.name for op in graph.inverses}
    runs: list[Executed] = []
    stays: list[Stay] = []
    since: dict[str, tuple[int, str]] = {}
    seen: set[str] = set()
    clock = 0.0

    def ended(tensor: str) -> None:
        first, kind = since.pop(tensor)
        stays.append(Stay(tensor, graph.size[tensor], kind, first, len(runs) - 1))

    for step in plan.schedule:
        if not isinstance(step, Run):
            ended(step.tensor)
            continue
        op = graph.op[step.op]
        again = op.name in seen or op.name in inverses
        backward = phases.get(op.name) == "backward"
        kind = GRADIENTS if backward else RECOMPUTED if again else ACTIVATIONS
        for tensor in op.writes:
            since.setdefault(tensor, (len(runs), kind))
        runs.append(Executed(op.name, modules.get(op.name, ""), again, clock, op.cost, op.workspace))
        clock += op.cost
        seen.add(op.name)
    for tensor in list(since):
        ended(tensor)
    others = graph.input_bytes - sum(graph.fixed_split.values())
    fixed = {kind: n for kind, n in {**graph.fixed_split, INPUTS: others}.items() if n}
    return Replay(fixed, tuple(runs), tuple(sorted(stays, key=lambda s: (s.first, s.tensor))))


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that is resident at the peak, and what would lower the peak by it."""

    tensor: str
    bytes: int
    op: str
    module: str
    readers: tuple[str, ...]
    advice: str


def held_at_peak(graph: TrainingGraph, plan: Plan, replayed: Replay, most: int = 10) -> tuple[Held, ...]:
    """Return the ``most`` largest tensors that are resident at a plan's peak, the largest first, without inputs; none
    if the inputs alone are the peak."""
    if plan.estimate.peak_at < 0:
        return ()
    at = sum(isinstance(step, Run) for step in plan.schedule[: plan.estimate.peak_at + 1]) - 1
    there = [s for s in replayed.stays if s.first <= at <= s.last]
    peak = graph.op[replayed.runs[at].op]
    found = sorted(there, key=lambda s: (-s.bytes, s.first))[:most]
    return tuple(
        Held(
            s.tensor,
            s.bytes,
            replayed.runs[s.first].op,
            replayed.runs[s.first].module,
            tuple(graph.readers.get(s.tensor, ())),
            _advice(graph, s.tensor, peak.name, (*peak.reads, *peak.writes)),
        )
        for s in found
    )


def _advice(graph: TrainingGraph, tensor: str, peak: str, used: Iterable[str]) -> str:
    """Return what would free ``tensor`` at the peak, or why it stays. ``peak``: the op that runs there; ``used``: what
    that op reads or writes."""
    maker = graph.ops[graph.producer[tensor]]
    if tensor in used:
        return f"{peak} reads or writes it: a smaller batch, or this op in parts"
    if tensor in graph.outputs and maker.phase != "forward":
        return "a result of the step (a gradient): it stays to the end"
    if tensor in graph.outputs:
        return "a result of the step: it stays to the end"
    if maker.name in graph.never_rerun:
        return f"{maker.name} may run only once"
    if maker.phase == "backward":
        return "a gradient that is read later"
    return f"{maker.name} could run again: state a lower budget"


@dataclass
class Branch:
    """A module, and the ops of it and its submodules that run again."""

    name: str
    runs: int = 0
    """The number of runs of these ops."""
    bytes: int = 0
    """The bytes that they write, each run's counted."""
    cost: float = 0.0
    """The time of the runs, in microseconds."""
    inner: dict[str, Branch] = field(default_factory=dict)
    """The submodules, by name."""

    @property
    def shape(self) -> tuple[object, ...]:
        """What layers that are shown as one have in common: all but their own names, and times."""
        return (self.runs, self.bytes, tuple((b.name, b.shape) for b in self.inner.values()))


def run_again(graph: TrainingGraph, replayed: Replay) -> Branch:
    """Return the tree of modules with the runs that recompute: their number, the bytes that they write, their time."""
    root = Branch("")
    for run in replayed.runs:
        if run.again:
            size = sum(graph.size[t] for t in graph.op[run.op].writes)
            branch = root
            for part in ("", *filter(None, run.module.split("."))):
                branch = branch.inner.setdefault(part, Branch(part)) if part else branch
                branch.runs, branch.bytes, branch.cost = (
                    branch.runs + 1,
                    branch.bytes + size,
                    branch.cost + run.cost,
                )
    return root


def folded(branch: Branch) -> Iterator[tuple[str, int, Branch]]:
    """Yield the submodules of a branch; neighbours of one shape with numbers as names are one. For each: its name, how
    many it represents, and the first of them with the time of all."""
    alike: list[Branch] = []
    for inner in [*branch.inner.values(), None]:
        if alike and (inner is None or not inner.name.isdecimal() or inner.shape != alike[0].shape):
            first, last = alike[0].name, alike[-1].name
            cost = sum(b.cost for b in alike)
            name = first if len(alike) == 1 else f"{first} … {last}"
            yield name, len(alike), replace(alike[0], cost=cost)
            alike = []
        if inner is not None:
            alike.append(inner)


def time_by_op(replayed: Replay, kinds: Mapping[str, str]) -> dict[str, tuple[int, float, float]]:
    """Return for each kind of op its runs, the time of first runs, and the time of runs again; the longest first.
    ``kinds``: the kind of each op by its name; otherwise the name without its number is the kind."""
    count: Counter[str] = Counter()
    times: dict[str, list[float]] = {}
    for run in replayed.runs:
        kind = kinds.get(run.op) or re.sub(r"_\d+$", "", run.op)
        count[kind] += 1
        times.setdefault(kind, [0.0, 0.0])[run.again] += run.cost
    ordered = sorted(times, key=lambda kind: -sum(times[kind]))
    return {kind: (count[kind], times[kind][0], times[kind][1]) for kind in ordered}
