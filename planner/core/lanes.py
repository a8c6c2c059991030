"""A plan on two lanes: gradients on the main lane, what brings tensors back on the recovery lane beside it.

Zhu, Mangalam, «PaReprop: fast parallelized reversible backpropagation», arXiv:2306.09342, for any plan: nothing that
recovery computes needs a gradient, so that it may run ahead of the gradients that it serves.

A plan stays one sequence of runs. Those before its first backward op run in one lane. After this *fork*, inverses and
forward ops that run again make the recovery lane, all others the main lane; each keeps the plan's order. A lane
waits for the other only where a `Lanes.waits` says so: for the data that it reads, and wherever it might else be so
far ahead that the two hold more than the budget (`rematplan.planner.core.lane_memory`). All that a wait names stands
earlier in the plan's sequence, which is therefore a legal order of both lanes: they cannot wait for each other.

A *copy* of a tensor lives from the run that makes it until neither lane is going to read it. Two copies of one tensor
may stand at the same time, when recovery is ahead; they are two variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from rematplan.ir import ProblemError, TrainingGraph

MAIN, RECOVERY = 0, 1
BEFORE = -1
"""The index on the main lane of what runs before the fork."""

Touches = tuple[Sequence[str], Sequence[str]]
"""What one run reads and writes."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a plan on two lanes has beyond its sequence. Positions are in the run sequence, from 0.

    ``fork``: of the first run after the fork. ``recovery``: of the runs on the recovery lane, ascending. ``waits``:
    pairs (run, other): the run starts when the other, of the other lane, has finished, and so have all before that on
    its lane. ``peak``: bytes that are never exceeded, however fast each lane is. ``makespan``: predicted time of the
    step, in the unit of costs. ``speed``: that of each lane while both run, to that of a lane alone, which the
    makespan was predicted with.
    """

    fork: int
    recovery: tuple[int, ...]
    waits: tuple[tuple[int, int], ...]
    peak: int
    makespan: float
    speed: float


@dataclass(frozen=True, slots=True)
class Sharing:
    """How two lanes share a device.

    ``speed``: of each while both run, to that of a lane alone: 1 on two devices, 0.5 on one that a lane fills. The
    best that PaReprop reports, 20 % more steps in the time, amounts to 0.75; the default lies halfway to no gain at
    all. ``handover``: what a wait costs the lane that waits; ``start``: what the second lane costs a step; both in the
    unit of costs.
    """

    speed: float = 0.625
    handover: float = 0.0
    start: float = 0.0


@dataclass(frozen=True)
class Placed:
    """The runs of a plan on their lanes: positions in the run sequence, from ``fork`` on."""

    fork: int
    main: tuple[int, ...]
    recovery: tuple[int, ...]

    @property
    def lanes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Both, by `MAIN` and `RECOVERY`."""
        return self.main, self.recovery

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """Lane and index there by position in the run sequence."""
        return {at: (lane, k) for lane, runs in enumerate(self.lanes) for k, at in enumerate(runs)}

    @cached_property
    def before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each run of a lane how many of the other lane's stand before it in the plan's sequence."""
        return self._others(MAIN), self._others(RECOVERY)

    def _others(self, lane: int) -> tuple[int, ...]:
        seen, counts = 0, []
        for _, its in sorted((at, its) for at, (its, _) in self.where.items()):
            if its == lane:
                counts.append(seen)
            seen += its != lane
        return tuple(counts)


def place(graph: TrainingGraph, runs: Sequence[str]) -> Placed:
    """The lanes of a run sequence; the recovery lane is empty where nothing comes back after the first backward op."""
    fork = next((at for at, name in enumerate(runs) if graph.op[name].phase == "backward"), len(runs))
    inverses = {inverse.name for inverse in graph.inverses}
    seen = set(runs[:fork])
    recovery = []
    for at in range(fork, len(runs)):
        name = runs[at]
        if name in inverses or (name in seen and graph.op[name].phase != "backward"):
            recovery.append(at)
        seen.add(name)
    return placed(fork, recovery, len(runs))


def placed(fork: int, recovery: Iterable[int], length: int) -> Placed:
    """The lanes, given which of ``length`` runs are recovery's.

    Raises:
        ProblemError: they are not runs after the fork, in order.
    """
    chosen = tuple(recovery)
    after = set(range(fork, length))
    if not 0 <= fork <= length or not after.issuperset(chosen) or any(a >= b for a, b in pairwise(chosen)):
        raise ProblemError("lanes: recovery's are not runs after the fork, each once, in order")
    return Placed(fork, tuple(sorted(after.difference(chosen))), chosen)


@dataclass(slots=True)
class Copy:
    """A copy of a tensor. ``lane`` and ``made``: of the run that makes it, `BEFORE` for what stands at the fork.

    ``first``, ``last``: by lane the indices of the runs that read it first and last, None for a lane that does not. The
    end of the step, which reads the outputs, comes after the main lane's last run and counts as one more.
    """

    tensor: str
    lane: int
    made: int
    first: list[int | None]
    last: list[int | None]

    def read(self, lane: int, index: int) -> None:
        """Note that a run reads it."""
        if index > BEFORE:
            if self.first[lane] is None:
                self.first[lane] = index
            self.last[lane] = index

    def crosses(self) -> bool:
        """Whether the lane that did not make it reads it."""
        return self.first[1 - self.lane] is not None


def copies_of(
    touches: Sequence[Touches], where: Placed, inputs: Iterable[str], outputs: Iterable[str]
) -> list[Copy]:
    """The copies that a run sequence makes, those of before the fork that nothing reads after it left out."""
    fixed, now, made = set(inputs), dict[str, Copy](), list[Copy]()
    for at, (reads, writes) in enumerate(touches):
        lane, index = where.where.get(at, (MAIN, BEFORE))
        for t in reads:
            if t not in fixed:
                now[t].read(lane, index)
        for t in writes:
            now[t] = Copy(t, lane, index, [None, None], [None, None])
            made.append(now[t])
    for t in outputs:
        if t not in fixed:
            now[t].read(MAIN, len(where.main))
    return [c for c in made if c.made > BEFORE or c.last != [None, None]]


Needs = tuple[list[int], list[int]]
"""By lane, for each of its runs, how many of the other lane's must have finished before it starts. Ascending."""


def data_needs(where: Placed, copies: Iterable[Copy], draws: Mapping[int, int]) -> Needs:
    """What the data alone asks for. The end counts as one more run of the main lane.

    ``draws``: by position of a random op's later run that of its first, whose random state it needs.
    """
    needs = [0] * (len(where.main) + 1), [0] * len(where.recovery)
    for copy in copies:
        if (reader := copy.first[1 - copy.lane]) is not None:
            row = needs[1 - copy.lane]
            row[reader] = max(row[reader], copy.made + 1)
    for later, first in draws.items():
        (lane, k), (other, made) = where.where[later], where.where.get(first, (MAIN, BEFORE))
        if lane != other:
            needs[lane][k] = max(needs[lane][k], made + 1)
    return ascending(needs)


def ascending(needs: Needs) -> Needs:
    """A lane has waited for whatever any of its runs before had to wait for."""
    return list(accumulate(needs[MAIN], max)), list(accumulate(needs[RECOVERY], max))


def check_needs(where: Placed, needs: Needs, data: Needs) -> None:
    """Refuse lanes that do not wait for what they read.

    Raises:
        ProblemError: names the run.
    """
    for runs, own, least in zip(where.lanes, needs, data, strict=True):
        for at, had, wanted in zip(runs, own, least, strict=False):
            if had < wanted:
                raise ProblemError(f"lanes: run {at} does not wait for what it reads")


def waits_of(where: Placed, needs: Needs) -> tuple[tuple[int, int], ...]:
    """The waits that ask for as much and no more than ``needs``."""
    found = []
    for lane, runs in enumerate(where.lanes):
        other = where.lanes[1 - lane]
        for at, (had, wanted) in zip(runs, pairwise((0, *needs[lane])), strict=False):
            if wanted > had:
                found.append((at, other[wanted - 1]))
    return tuple(sorted(found))


def needs_of(where: Placed, waits: Iterable[tuple[int, int]]) -> Needs:
    """What waits ask for. The end of the step waits for both lanes.

    Raises:
        ProblemError: a wait that does not name two runs after the fork, one of each lane, the awaited one first.
    """
    needs = [0] * (len(where.main) + 1), [0] * len(where.recovery)
    for run, awaited in waits:
        if not (run in where.where and awaited in where.where and awaited < run):
            raise ProblemError(f"lanes: run {run} cannot wait for run {awaited}")
        (lane, k), (other, j) = where.where[run], where.where[awaited]
        if lane == other:
            raise ProblemError(f"lanes: runs {run} and {awaited} are on one lane")
        needs[lane][k] = max(needs[lane][k], j + 1)
    needs[MAIN][-1] = len(where.recovery)
    return ascending(needs)


def later_draws(runs: Sequence[str], ordered: Iterable[str]) -> dict[int, int]:
    """Positions of the later runs of random ops, each with that of the first."""
    first: dict[str, int] = {}
    wanted = set(ordered)
    return {
        at: first[name] for at, name in enumerate(runs) if name in wanted and first.setdefault(name, at) != at
    }


@dataclass(frozen=True)
class Laned:
    """A problem, a run sequence of it, and the lanes of these runs."""

    graph: TrainingGraph
    runs: tuple[str, ...]
    where: Placed

    @cached_property
    def copies(self) -> list[Copy]:
        """The copies of tensors that matter after the fork."""
        rows = [self.graph.op[name] for name in self.runs]
        touches = [(op.reads, op.writes) for op in rows]
        return copies_of(touches, self.where, self.graph.inputs, self.graph.outputs)

    @cached_property
    def data(self) -> Needs:
        """What the lanes must wait for, whatever the memory."""
        later = later_draws(self.runs, self.graph.ordered)
        draws = {at: first for at, first in later.items() if at in self.where.where}
        return data_needs(self.where, self.copies, draws)


def lanes_to_json(lanes: Lanes) -> dict[str, Any]:
    """The lanes as plain JSON data."""
    return asdict(lanes)


def lanes_from_json(data: Any) -> Lanes:
    """The lanes that plain JSON data states, as they are stated.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or of another type.
    """
    return Lanes(
        fork=int(data["fork"]),
        recovery=tuple(map(int, data["recovery"])),
        waits=tuple((int(run), int(other)) for run, other in data["waits"]),
        peak=int(data["peak"]),
        makespan=float(data["makespan"]),
        speed=float(data["speed"]),
    )
