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
"""The index on the main lane that stands for all runs before the plan's first backward op."""

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
    """The runs of a plan from its first backward op on, divided into the main lane and the recovery lane.

    All numbers are positions in the plan's sequence of runs, from 0. ``fork``: position of the first backward op.
    ``main``, ``recovery``: positions of the runs of each lane, ascending.
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
        """For the position of each run from ``fork`` on, its lane (`MAIN` or `RECOVERY`) and its index within the
        lane."""
        return {at: (lane, k) for lane, runs in enumerate(self.lanes) for k, at in enumerate(runs)}

    @cached_property
    def before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each lane and each of its runs, how many runs of the other lane precede that run in the plan's
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
    """Divide a plan's sequence of runs (names of ops and inverses) into two lanes.

    Lanes begin at the first backward op. From there on the recovery lane gets inverses and forward ops that have run
    before; it is empty if there are none. The main lane gets all other runs.
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
    """Return the division of ``length`` runs into lanes in which the recovery lane has the runs at the positions
    ``recovery``.

    The main lane has all other runs from the position ``fork`` on.

    Raises:
        ProblemError: ``recovery`` is not ascending, or has a position outside of ``fork`` .. ``length`` - 1.
    """
    chosen = tuple(recovery)
    after = set(range(fork, length))
    if not 0 <= fork <= length or not after.issuperset(chosen) or any(a >= b for a, b in pairwise(chosen)):
        raise ProblemError("lanes: the recovery lane's runs must be after the fork, each once, in order")
    return Placed(fork, tuple(sorted(after.difference(chosen))), chosen)


@dataclass(slots=True)
class Copy:
    """One tensor as one run wrote it. A tensor that is written by several runs has several copies.

    ``tensor``: its name. ``lane``: the lane of the run that wrote it (`MAIN` or `RECOVERY`). ``made``: that run's
    index within its lane; `BEFORE` if it ran before the plan's first backward op. ``first``, ``last``: for each lane,
    the indices of the first and last of its runs that read the copy; None if none does. The end of the step reads the
    outputs; it counts as one more run of the main lane.
    """

    tensor: str
    lane: int
    made: int
    first: list[int | None]
    last: list[int | None]

    def read(self, lane: int, index: int) -> None:
        """Record that run ``index`` of ``lane`` reads the copy. Nothing is recorded if ``index`` is `BEFORE`."""
        if index > BEFORE:
            if self.first[lane] is None:
                self.first[lane] = index
            self.last[lane] = index

    def crosses(self) -> bool:
        """Return whether a run of the other lane than the one that wrote the copy reads it."""
        return self.first[1 - self.lane] is not None


def copies_of(
    touches: Sequence[Touches], where: Placed, inputs: Iterable[str], outputs: Iterable[str]
) -> list[Copy]:
    """Return the copies of tensors (results of single runs) that matter from the plan's first backward op on: those
    written from there on, and earlier ones that are read there.

    Args:
        touches: for each run of the plan, the tensors it reads and the tensors it writes.
        where: the division of the runs into lanes.
        inputs: tensors that are always resident; they have no copies.
        outputs: tensors that the end of the step reads.
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
    """Return the waits between two lanes that data dependences require: a run waits until everything that it reads
    is written. The end of the step counts as one more run of the main lane.

    Args:
        where: the division of the runs into lanes.
        copies: the results of single runs, each with the first runs that read it.
        draws: for the position of each repeated run of a random op, the position of the op's first run, whose random
            state the repeated run needs.
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
    """Return ``needs`` with every run also waiting for everything that earlier runs of its lane wait for.

    ``needs``: for each run of a lane, how many runs of the other lane must have finished before it starts.
    """
    return list(accumulate(needs[MAIN], max)), list(accumulate(needs[RECOVERY], max))


def check_needs(where: Placed, needs: Needs, data: Needs) -> None:
    """Check that every run waits at least as long as its data dependences require.

    ``needs``: the waits of a plan. ``data``: the waits that `data_needs` returns.

    Raises:
        ProblemError: a run does not wait for a tensor that it reads; the message names the run by its position.
    """
    for runs, own, least in zip(where.lanes, needs, data, strict=True):
        for at, had, wanted in zip(runs, own, least, strict=False):
            if had < wanted:
                raise ProblemError(f"lanes: run {at} does not wait for a tensor that it reads")


def waits_of(where: Placed, needs: Needs) -> tuple[tuple[int, int], ...]:
    """Return the fewest pairs (run, awaited run), by position, such that waiting for them enforces ``needs``: for
    each run of a lane, how many runs of the other lane must have finished before it starts.

    The two runs of a pair are on different lanes. Pairs are sorted. `needs_of` is the converse.
    """
    found = []
    for lane, runs in enumerate(where.lanes):
        other = where.lanes[1 - lane]
        for at, (had, wanted) in zip(runs, pairwise((0, *needs[lane])), strict=False):
            if wanted > had:
                found.append((at, other[wanted - 1]))
    return tuple(sorted(found))


def needs_of(where: Placed, waits: Iterable[tuple[int, int]]) -> Needs:
    """Return how many runs of the other lane each run has to wait for, given pairs of runs.

    ``waits``: pairs (run, awaited run) by position, as in `Lanes`. The end of the step waits for all runs of both
    lanes.

    Raises:
        ProblemError: a pair does not name two runs from ``where.fork`` on, one on each lane, the awaited one first in
            the plan's sequence.
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
    """Return, for the position of each repeated run of a random op, the position of the op's first run.

    ``runs``: names of ops, in order. ``ordered``: the names of the random ops.
    """
    first: dict[str, int] = {}
    wanted = set(ordered)
    return {
        at: first[name] for at, name in enumerate(runs) if name in wanted and first.setdefault(name, at) != at
    }


@dataclass(frozen=True)
class Laned:
    """A planning problem (``graph``), the names of a plan's runs in order, and the division of these runs into two
    lanes (``where``)."""

    graph: TrainingGraph
    runs: tuple[str, ...]
    where: Placed

    @cached_property
    def copies(self) -> list[Copy]:
        """The results of single runs that are live at the plan's first backward op, where lanes divide, or written
        after it."""
        rows = [self.graph.op[name] for name in self.runs]
        touches = [(op.reads, op.writes) for op in rows]
        return copies_of(touches, self.where, self.graph.inputs, self.graph.outputs)

    @cached_property
    def data(self) -> Needs:
        """The waits between the lanes that data dependences require, whatever the budget."""
        later = later_draws(self.runs, self.graph.ordered)
        draws = {at: first for at, first in later.items() if at in self.where.where}
        return data_needs(self.where, self.copies, draws)


def lanes_to_json(lanes: Lanes) -> dict[str, Any]:
    """Convert lanes to plain JSON data: an object with the fields of `Lanes`."""
    return asdict(lanes)


def lanes_from_json(data: Any) -> Lanes:
    """Build `Lanes` from plain JSON data, without checking that they fit a schedule.

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
