"""A plan on two lanes: the main lane computes gradients, the recovery lane rematerialises tensors at the same time.

Zhu, Mangalam, «PaReprop: fast parallelized reversible backpropagation», arXiv:2306.09342, extended to any plan.
Nothing that the recovery lane computes depends on a gradient, so it can run ahead of the gradients that need its
results.

A plan remains one sequence of runs. The runs before its first backward op are on one lane. After this *fork*,
inverses and forward ops that run again are on the recovery lane, all other runs on the main lane; each lane keeps
the plan's order. A lane waits for the other only where `Lanes.waits` says so: for data that it reads, and where it
would otherwise get so far ahead that both together exceed the budget (`rematplan.planner.core.lane_memory`). Every
run waits only for earlier runs of the plan's sequence, so the lanes cannot deadlock.

A *copy* of a tensor is the result of one run; it lives until no lane will read it any more. When the recovery lane
is ahead, two copies of one tensor can be live at the same time. They are two variables.
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
"""The index on the main lane that stands for everything before the fork."""

Touches = tuple[Sequence[str], Sequence[str]]
"""The tensors that one run reads, and the tensors that it writes."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a plan on two lanes states in addition to its sequence of runs. Positions count runs from 0.

    ``fork``: position of the first run after the fork. ``recovery``: positions of the runs on the recovery lane,
    ascending. ``waits``: pairs (run, other): the run starts after ``other``, which is on the other lane, has
    finished. ``peak``: bytes that are not exceeded at any speed of the lanes. ``makespan``: predicted time of the
    step, in the unit of costs. ``speed``: the speed of each lane while both run, relative to a lane that runs
    alone, as assumed for the makespan.
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

    ``speed``: the speed of each lane while both run, relative to a lane that runs alone: 1 on two devices, 0.5 if
    one lane already fills the device. PaReprop's best result, 20 % more steps per time, corresponds to 0.75; the
    default is halfway between that and no gain. ``handover``: what a wait costs the waiting lane. ``start``: what
    the second lane costs per step. Both are in the unit of costs.
    """

    speed: float = 0.625
    handover: float = 0.0
    start: float = 0.0


@dataclass(frozen=True)
class Placed:
    """The runs of a plan from the fork on, divided into lanes.

    All numbers are positions in the plan's sequence of runs: ``fork`` of the first run after the fork, ``main`` and
    ``recovery`` of the runs of each lane, ascending.
    """

    fork: int
    main: tuple[int, ...]
    recovery: tuple[int, ...]

    @property
    def lanes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of both lanes, indexed by `MAIN` and `RECOVERY`."""
        return self.main, self.recovery

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """For each position in the sequence of runs, the lane and the index within the lane."""
        return {at: (lane, k) for lane, runs in enumerate(self.lanes) for k, at in enumerate(runs)}

    @cached_property
    def before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each lane and each of its runs, the number of runs of the other lane that precede it in the plan's
        sequence."""
        return self._others(MAIN), self._others(RECOVERY)

    def _others(self, lane: int) -> tuple[int, ...]:
        seen, counts = 0, []
        for _, its in sorted((at, its) for at, (its, _) in self.where.items()):
            if its == lane:
                counts.append(seen)
            seen += its != lane
        return tuple(counts)


def place(graph: TrainingGraph, runs: Sequence[str]) -> Placed:
    """Divide a sequence of runs into lanes. The recovery lane is empty if nothing is rematerialised after the first
    backward op."""
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
    """Return the division of ``length`` runs in which ``recovery`` lists the positions of the recovery lane's runs.

    The main lane has all other runs from the position ``fork`` on.

    Raises:
        ProblemError: ``recovery`` is not ascending, or has positions outside of ``fork`` .. ``length`` - 1.
    """
    chosen = tuple(recovery)
    after = set(range(fork, length))
    if not 0 <= fork <= length or not after.issuperset(chosen) or any(a >= b for a, b in pairwise(chosen)):
        raise ProblemError("lanes: the recovery lane's runs must be after the fork, each once, in order")
    return Placed(fork, tuple(sorted(after.difference(chosen))), chosen)


@dataclass(slots=True)
class Copy:
    """The result of one run: one tensor that it writes.

    ``lane``: the lane of that run. ``made``: the run's index on the lane; `BEFORE` if it ran before the fork.
    ``first`` and ``last``: per lane, the indices of the runs that read the copy first and last; None if the lane does
    not read it. The end of the step reads the outputs; it counts as one more run of the main lane.
    """

    tensor: str
    lane: int
    made: int
    first: list[int | None]
    last: list[int | None]

    def read(self, lane: int, index: int) -> None:
        """Record that the run of this index on a lane reads the copy. Runs before the fork are not recorded."""
        if index > BEFORE:
            if self.first[lane] is None:
                self.first[lane] = index
            self.last[lane] = index

    def crosses(self) -> bool:
        """Whether the lane that did not write the copy reads it."""
        return self.first[1 - self.lane] is not None


def copies_of(
    touches: Sequence[Touches], where: Placed, inputs: Iterable[str], outputs: Iterable[str]
) -> list[Copy]:
    """Return the copies that a sequence of runs makes, except those from before the fork that nobody reads after it.

    ``touches``: what each run reads and writes. ``where``: the lanes of the runs. ``inputs`` have no copies; the end
    of the step reads the ``outputs``.
    """
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
"""Per lane and run: how many runs of the other lane must have finished before the run starts. Ascending within a
lane."""


def data_needs(where: Placed, copies: Iterable[Copy], draws: Mapping[int, int]) -> Needs:
    """Return the waits that data dependences require. The end of the step counts as one more run of the main lane.

    ``draws``: maps the position of a random op's later run to that of its first run, whose random state it needs.
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
    """Return the needs with every run also waiting for everything that earlier runs of its lane wait for."""
    return list(accumulate(needs[MAIN], max)), list(accumulate(needs[RECOVERY], max))


def check_needs(where: Placed, needs: Needs, data: Needs) -> None:
    """Check that every run waits for what it reads.

    Raises:
        ProblemError: a run does not; the message names it.
    """
    for runs, own, least in zip(where.lanes, needs, data, strict=True):
        for at, had, wanted in zip(runs, own, least, strict=False):
            if had < wanted:
                raise ProblemError(f"lanes: run {at} does not wait for a tensor that it reads")


def waits_of(where: Placed, needs: Needs) -> tuple[tuple[int, int], ...]:
    """Return the fewest waits that enforce ``needs``, as in `Lanes`: pairs (run, run of the other lane that it waits
    for)."""
    found = []
    for lane, runs in enumerate(where.lanes):
        other = where.lanes[1 - lane]
        for at, (had, wanted) in zip(runs, pairwise((0, *needs[lane])), strict=False):
            if wanted > had:
                found.append((at, other[wanted - 1]))
    return tuple(sorted(found))


def needs_of(where: Placed, waits: Iterable[tuple[int, int]]) -> Needs:
    """Return the needs that waits (as in `Lanes`) enforce. The end of the step waits for both lanes.

    Raises:
        ProblemError: a wait does not name two runs after the fork, one on each lane, the awaited one first.
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
    """Map the position of each later run of a random op to the position of that op's first run.

    ``ordered``: the names of the random ops.
    """
    first: dict[str, int] = {}
    wanted = set(ordered)
    return {
        at: first[name] for at, name in enumerate(runs) if name in wanted and first.setdefault(name, at) != at
    }


@dataclass(frozen=True)
class Laned:
    """A problem, a sequence of runs, and the lanes of these runs."""

    graph: TrainingGraph
    runs: tuple[str, ...]
    where: Placed

    @cached_property
    def copies(self) -> list[Copy]:
        """The copies of tensors that are live at the fork or made after it."""
        rows = [self.graph.op[name] for name in self.runs]
        touches = [(op.reads, op.writes) for op in rows]
        return copies_of(touches, self.where, self.graph.inputs, self.graph.outputs)

    @cached_property
    def data(self) -> Needs:
        """The waits that data dependences require, regardless of memory."""
        later = later_draws(self.runs, self.graph.ordered)
        draws = {at: first for at, first in later.items() if at in self.where.where}
        return data_needs(self.where, self.copies, draws)


def lanes_to_json(lanes: Lanes) -> dict[str, Any]:
    """Convert lanes to plain JSON data."""
    return asdict(lanes)


def lanes_from_json(data: Any) -> Lanes:
    """Read lanes from plain JSON data, without checking them.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or has another type.
    """
    return Lanes(
        fork=int(data["fork"]),
        recovery=tuple(map(int, data["recovery"])),
        waits=tuple((int(run), int(other)) for run, other in data["waits"]),
        peak=int(data["peak"]),
        makespan=float(data["makespan"]),
        speed=float(data["speed"]),
    )
