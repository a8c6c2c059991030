"""Plans on two lanes: the main lane computes gradients, and the recovery lane rematerialises tensors at the same
time. A lane is a CUDA stream, or a thread on the CPU.

Source: Zhu and Mangalam, «PaReprop: fast parallelized reversible backpropagation», arXiv:2306.09342, here for any
plan. The recovery lane can run ahead of the main lane, because nothing that it computes depends on a gradient.

A plan is still one sequence of runs. The runs before its first backward op, called the *fork*, are on one lane. From
the fork on, inverses and repeated forward ops are on the recovery lane, and all other runs on the main lane. Each
lane executes its runs in the order of the plan. A lane waits for the other only where `Lanes.waits` says so. There
are two reasons: it reads data that the other lane writes; or, without the wait, the resident bytes could exceed the
budget (`rematplan.planner.core.lane_memory`). A run waits only for earlier runs of the plan's sequence, so the lanes
cannot deadlock.

A *copy* of a tensor is the result of one run of the op or inverse that writes it. It is live until no lane will read
it any more. When the recovery lane is ahead, two copies of one tensor can be live at the same time, in separate
storages.
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
"""Used as an index on the main lane for every run before the plan's first backward op."""

Touches = tuple[Sequence[str], Sequence[str]]
"""The tensors that one run reads, and the tensors that it writes."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a plan on two lanes states in addition to its sequence of runs. A lane is a CUDA stream, or a thread on
    the CPU.

    All runs before the plan's first backward op are on one lane. From there on, the *recovery lane* runs inverses and
    repeated forward ops, and the *main lane* everything else. Positions count the plan's runs from 0.

    ``fork``: position of the first backward op, at which the lanes divide. ``recovery``: positions of the runs on the
    recovery lane, ascending. ``waits``: pairs (run, other) of positions: ``run`` starts after ``other``, a run of the
    other lane, has finished. ``peak``: bytes that are not exceeded at any relative speed of the lanes. ``makespan``:
    predicted time of the step, in the unit of `Op.cost`. ``speed``: the speed that the makespan assumes for each lane
    while both run, relative to a lane that runs alone.
    """

    fork: int
    recovery: tuple[int, ...]
    waits: tuple[tuple[int, int], ...]
    peak: int
    makespan: float
    speed: float


@dataclass(frozen=True, slots=True)
class Sharing:
    """How two lanes (CUDA streams, or threads on the CPU) share a device, for the prediction of a plan's time.

    ``speed``: the speed of each lane while both run, relative to a lane that runs alone: 1 on two devices, 0.5 if one
    lane already fills the device. PaReprop's best result, 20 % more steps per time, corresponds to 0.75; the default
    is halfway between 0.75 and 0.5. ``handover``: the time that one wait for the other lane costs. ``start``: the
    time per step that the second lane costs. Both times are in the unit of `Op.cost`.
    """

    speed: float = 0.625
    handover: float = 0.0
    start: float = 0.0


@dataclass(frozen=True)
class Placed:
    """The runs of a plan from its first backward op on, divided into two lanes (CUDA streams, or threads on the CPU):
    the main lane and the recovery lane.

    All numbers are positions in the plan's sequence of runs, from 0. ``fork``: the position of the first backward op.
    ``main``, ``recovery``: the positions of the runs of each lane, ascending.
    """

    fork: int
    main: tuple[int, ...]
    recovery: tuple[int, ...]

    @property
    def lanes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of the runs of both lanes, indexed by `MAIN` (0) and `RECOVERY` (1)."""
        return self.main, self.recovery

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """For each run from the first backward op on, by its position in the plan: its lane (`MAIN` or `RECOVERY`, a
        stream or thread each) and its index among the runs of this lane."""
        return {at: (lane, k) for lane, runs in enumerate(self.lanes) for k, at in enumerate(runs)}

    @cached_property
    def before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each run of each lane (a stream or thread), how many runs of the other lane precede it in the plan's
        sequence. The two tuples are indexed by `MAIN` and `RECOVERY`."""
        return self._others(MAIN), self._others(RECOVERY)

    def _others(self, lane: int) -> tuple[int, ...]:
        seen, counts = 0, []
        for _, its in sorted((at, its) for at, (its, _) in self.where.items()):
            if its == lane:
                counts.append(seen)
            seen += its != lane
        return tuple(counts)


def place(graph: TrainingGraph, runs: Sequence[str]) -> Placed:
    """Divide a plan's sequence of runs (names of ops and inverses) into two lanes (CUDA streams, or threads on the
    CPU).

    All runs before the first backward op are on one lane. From there on, the recovery lane gets the inverses and the
    forward ops that have run before, and the main lane gets all other runs. The recovery lane may be empty.
    """
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
    """Return the division of a plan's ``length`` runs into two lanes (CUDA streams, or threads on the CPU), where the
    runs at the positions ``recovery`` are on the recovery lane, and all others from the position ``fork`` on are
    on the main lane.
    """
    chosen = tuple(recovery)
    after = set(range(fork, length))
    if not 0 <= fork <= length or not after.issuperset(chosen) or any(a >= b for a, b in pairwise(chosen)):
        raise ProblemError("lanes: the recovery lane's runs must be after the fork, each once, in order")
    return Placed(fork, tuple(sorted(after.difference(chosen))), chosen)


@dataclass(slots=True)
class Copy:
    """A copy of a tensor: the result of one run of a plan on two lanes (streams or threads). A tensor that is written
    by several runs has several copies.

    ``tensor``: the tensor's name. ``lane``: the lane of the run that wrote the copy (`MAIN` or `RECOVERY`). ``made``:
    the index of that run within its lane, or `BEFORE` if it ran before the plan's first backward op. ``first``,
    ``last``: indexed by lane, the indices within the lane of the first and the last run that read the copy; None if
    none does. The outputs are read at the end of the step, which counts as one more run of the main lane.
    """

    tensor: str
    lane: int
    made: int
    first: list[int | None]
    last: list[int | None]

    def read(self, lane: int, index: int) -> None:
        """Record that the run with the index ``index`` within ``lane`` reads this copy of a tensor. Nothing is
        recorded for a run before the plan's first backward op (`BEFORE`)."""
        if index > BEFORE:
            if self.first[lane] is None:
                self.first[lane] = index
            self.last[lane] = index

    def crosses(self) -> bool:
        """Return whether this copy of a tensor is read on the other one of the two lanes (streams or threads) than
        the one on which it was written."""
        return self.first[1 - self.lane] is not None


def copies_of(
    touches: Sequence[Touches], where: Placed, inputs: Iterable[str], outputs: Iterable[str]
) -> list[Copy]:
    """Return the copies of tensors (each is the result of one run) that are written or read from the plan's first
    backward op on.
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
"""For each lane and each of its runs: how many runs of the other lane must have finished before that run starts.
Ascending within a lane. The main lane has one more entry, for the end of the step."""


def data_needs(where: Placed, copies: Iterable[Copy], draws: Mapping[int, int]) -> Needs:
    """Return the waits between two lanes (streams or threads) that data dependences require. For each run of a lane,
    the result says how many runs of the other lane must have finished before it starts. The end of the step counts
    as one more run of the main lane.
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
    """Return the waits ``needs`` between two lanes (streams or threads) with implied waits added: a run also waits
    for everything that earlier runs of its lane wait for.

    ``needs``: for each run of a lane, how many runs of the other lane must have finished before it starts.
    """
    return list(accumulate(needs[MAIN], max)), list(accumulate(needs[RECOVERY], max))


def check_needs(where: Placed, needs: Needs, data: Needs) -> None:
    """Check that every run of a plan on two lanes (streams or threads) waits for all data that it reads."""
    for runs, own, least in zip(where.lanes, needs, data, strict=True):
        for at, had, wanted in zip(runs, own, least, strict=False):
            if had < wanted:
                raise ProblemError(f"lanes: run {at} does not wait for a tensor that it reads")


def waits_of(where: Placed, needs: Needs) -> tuple[tuple[int, int], ...]:
    """Convert waits between two lanes (streams or threads) to the fewest pairs of runs (run, awaited run), sorted.
    Runs are positions in the plan.

    ``needs``: for each run of a lane, how many runs of the other lane must have finished before it starts. The
    awaited run of a pair is the last of these. A run has no pair if an earlier run of its lane already waits for as
    many. The end of the step has no pair, because it always waits for both lanes. `needs_of` is the converse.
    """
    found = []
    for lane, runs in enumerate(where.lanes):
        other = where.lanes[1 - lane]
        for at, (had, wanted) in zip(runs, pairwise((0, *needs[lane])), strict=False):
            if wanted > had:
                found.append((at, other[wanted - 1]))
    return tuple(sorted(found))


def needs_of(where: Placed, waits: Iterable[tuple[int, int]]) -> Needs:
    """Convert pairs of runs (run, awaited run) on two lanes (streams or threads) to `Needs`: for each run of a lane,
    how many runs of the other lane must have finished before it starts. The end of the step waits for all runs of
    both lanes.

    ``waits``: the pairs, by position in the plan, as in `Lanes`.
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
    """Return, for each repeated run of a random op, the position of the op's first run. Keys and values are positions
    in ``runs``.

    ``runs``: the names of ops and inverses, in order. ``ordered``: the names of the random ops.
    """
    first: dict[str, int] = {}
    wanted = set(ordered)
    return {
        at: first[name] for at, name in enumerate(runs) if name in wanted and first.setdefault(name, at) != at
    }


@dataclass(frozen=True)
class Laned:
    """A plan on two lanes: the planning problem (``graph``), the names of the ops and inverses that run, in order
    (``runs``), and the division of these runs into lanes (``where``)."""

    graph: TrainingGraph
    runs: tuple[str, ...]
    where: Placed

    @cached_property
    def copies(self) -> list[Copy]:
        """The copies of tensors (each is the result of one run) that are written or read from the plan's first
        backward op on, where the lanes divide."""
        rows = [self.graph.op[name] for name in self.runs]
        touches = [(op.reads, op.writes) for op in rows]
        return copies_of(touches, self.where, self.graph.inputs, self.graph.outputs)

    @cached_property
    def data(self) -> Needs:
        """The waits between the lanes that data dependences require: for each run of a lane, how many runs of the
        other lane must have finished before it starts. Waits for memory are not included."""
        later = later_draws(self.runs, self.graph.ordered)
        draws = {at: first for at, first in later.items() if at in self.where.where}
        return data_needs(self.where, self.copies, draws)


def lanes_to_json(lanes: Lanes) -> dict[str, Any]:
    """Convert the division of a plan into two lanes (streams or threads) to plain JSON data: an object with the
    fields of `Lanes`."""
    return asdict(lanes)


def lanes_from_json(data: Any) -> Lanes:
    """Convert plain JSON data to the division of a plan into two lanes (streams or threads), without checking that it
    fits a schedule.
    """
    return Lanes(
        fork=int(data["fork"]),
        recovery=tuple(map(int, data["recovery"])),
        waits=tuple((int(run), int(other)) for run, other in data["waits"]),
        peak=int(data["peak"]),
        makespan=float(data["makespan"]),
        speed=float(data["speed"]),
    )
