"""Plans on two lanes (CUDA streams or threads): the main lane computes gradients, the recovery lane
rematerialises tensors meanwhile.

Source: Zhu and Mangalam, PaReprop, arXiv:2306.09342, here for any plan. Inverses and repeated forward ops
after the *fork*, the first backward op, are on the recovery lane. Runs wait for earlier runs of the plan
alone, so lanes cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from rematplan.ir import ProblemError, TrainingGraph

MAIN, RECOVERY = 0, 1
BEFORE = -1
"""The index of every run before the plan's first backward op. They count as runs of the main lane."""

Touches = tuple[Sequence[str], Sequence[str]]
"""The tensors that one run reads, and the tensors that it writes."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a plan on two lanes states in addition to its runs, whose positions count from 0."""

    fork: int
    """The position of the first backward op, at which the lanes divide."""
    recovery: tuple[int, ...]
    """The positions of the recovery lane's runs, ascending."""
    waits: tuple[tuple[int, int], ...]
    """Pairs of positions: the first run starts after the second one, on the other lane, has finished."""
    peak: int
    """Bytes that no relative speed of the lanes exceeds."""
    makespan: float
    """The predicted time of the step, in the unit of `Op.cost`."""
    speed: float
    """The speed that the makespan assumes for each lane while both run, relative to one that runs alone."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How two lanes share a device, for predicted times. Times are in the unit of `Op.cost`."""

    speed: float = 0.625
    """The speed of each lane while both run, relative to one that runs alone: 1 on two devices, 0.5 if one lane fills
    the device. PaReprop's best result corresponds to 0.75."""
    handover: float = 0.0
    """The time of a wait for the other lane."""
    start: float = 0.0
    """The time per step that the second lane costs."""


@dataclass(frozen=True)
class Placed:
    """The runs of a plan from position ``fork`` on, divided into two lanes. ``main``, ``recovery``: the positions of
    each lane's runs in the plan, counted from 0, ascending."""

    fork: int
    main: tuple[int, ...]
    recovery: tuple[int, ...]

    @property
    def lanes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of the runs of both lanes, indexed by `MAIN` (0) and `RECOVERY` (1)."""
        return self.main, self.recovery

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """By position of each run from the fork on: its lane (`MAIN` or `RECOVERY`) and its index within the lane."""
        return {at: (lane, k) for lane, runs in enumerate(self.lanes) for k, at in enumerate(runs)}

    @cached_property
    def before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each run of each lane, how many runs of the other lane precede it in the plan's sequence."""
        return self._others(MAIN), self._others(RECOVERY)

    def _others(self, lane: int) -> tuple[int, ...]:
        seen, counts = 0, []
        for _, its in sorted((at, its) for at, (its, _) in self.where.items()):
            if its == lane:
                counts.append(seen)
            seen += its != lane
        return tuple(counts)


def place(graph: TrainingGraph, runs: Sequence[str]) -> Placed:
    """Divide a plan's runs into lanes: from the first backward op on, inverses and repeated forward ops go to the
    recovery lane. Without a backward op both lanes are empty."""
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
    """Return ``length`` runs with those at ``recovery`` on the recovery lane, and the others from ``fork`` on on the
    main lane. `ProblemError` unless ``fork`` is from 0 to ``length``, and ``recovery`` ascends within the positions
    from ``fork`` on."""
    chosen = tuple(recovery)
    after = set(range(fork, length))
    if not 0 <= fork <= length or not after.issuperset(chosen) or any(a >= b for a, b in pairwise(chosen)):
        raise ProblemError("lanes: the recovery lane's runs must be after the fork, each once, in order")
    return Placed(fork, tuple(sorted(after.difference(chosen))), chosen)


@dataclass(slots=True)
class Copy:
    """A copy of a tensor: the result of one run of a plan on two lanes. A tensor may have several."""

    tensor: str
    lane: int
    """The lane of the run that wrote the copy."""
    made: int
    """The index of that run within its lane; `BEFORE` if it ran before the fork."""
    first: list[int | None]
    """By lane, the index of the first run that reads the copy; None if none does."""
    last: list[int | None]
    """By lane, the index of the last run that reads the copy, or None. The end of the step reads outputs: it counts as
    one more run of the main lane."""

    def read(self, lane: int, index: int) -> None:
        """Record that run ``index`` of ``lane`` reads this copy, except before the fork (`BEFORE`)."""
        if index > BEFORE:
            if self.first[lane] is None:
                self.first[lane] = index
            self.last[lane] = index

    def crosses(self) -> bool:
        """Return whether the copy is read on another lane than the one that wrote it."""
        return self.first[1 - self.lane] is not None


def copies_of(
    touches: Sequence[Touches], where: Placed, inputs: Iterable[str], outputs: Iterable[str]
) -> list[Copy]:
    """Return the copies of tensors that are written or read from the fork on, in the order of writing. ``touches``: for
    each run of the plan. ``inputs`` have no copies; the end of the main lane reads the ``outputs``."""
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
    """Return the waits that data dependences and the order of random draws require. ``draws``: by position of a
    repeated random run from the fork on, the position of the op's first run."""
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
    """Return ``needs`` with implied waits added: a run also waits for all that earlier runs of its lane wait for."""
    return list(accumulate(needs[MAIN], max)), list(accumulate(needs[RECOVERY], max))


def check_needs(where: Placed, needs: Needs, data: Needs) -> None:
    """Raise `ProblemError` unless each run of a plan on two lanes waits, by ``needs``, for all runs that it needs by
    ``data``."""
    for runs, own, least in zip(where.lanes, needs, data, strict=True):
        for at, had, wanted in zip(runs, own, least, strict=False):
            if had < wanted:
                raise ProblemError(f"lanes: run {at} does not wait for a tensor that it reads")


def waits_of(where: Placed, needs: Needs) -> tuple[tuple[int, int], ...]:
    """Convert `Needs` to the fewest sorted pairs (run, awaited run), by position in the plan; `needs_of` is the
    converse. The end of the step, which waits for all runs, is left out."""
    found = []
    for lane, runs in enumerate(where.lanes):
        other = where.lanes[1 - lane]
        for at, (had, wanted) in zip(runs, pairwise((0, *needs[lane])), strict=False):
            # An earlier run of the lane already waits for the others. The end of the step always waits for
            # both lanes.
            if wanted > had:
                found.append((at, other[wanted - 1]))
    return tuple(sorted(found))


def needs_of(where: Placed, waits: Iterable[tuple[int, int]]) -> Needs:
    """Convert pairs (run, awaited run), by position in the plan, to `Needs`. The end of the step waits for all runs.
    `ProblemError` unless both runs are from the fork on, on different lanes, the awaited one first."""
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
    """Return, by position of each repeated run of an op in ``ordered``, the position of its first run."""
    first: dict[str, int] = {}
    wanted = set(ordered)
    return {
        at: first[name] for at, name in enumerate(runs) if name in wanted and first.setdefault(name, at) != at
    }


@dataclass(frozen=True)
class Laned:
    """A plan on two lanes: its problem, the names of its runs in order, and the lane of each run."""

    graph: TrainingGraph
    runs: tuple[str, ...]
    where: Placed

    @cached_property
    def copies(self) -> list[Copy]:
        """The copies of tensors that are written or read from the first backward op on."""
        rows = [self.graph.op[name] for name in self.runs]
        touches = [(op.reads, op.writes) for op in rows]
        return copies_of(touches, self.where, self.graph.inputs, self.graph.outputs)

    @cached_property
    def data(self) -> Needs:
        """The waits that data dependences and the order of random draws require; waits for memory are not included."""
        later = later_draws(self.runs, self.graph.ordered)
        draws = {at: first for at, first in later.items() if at in self.where.where}
        return data_needs(self.where, self.copies, draws)


def lanes_from_json(data: Any) -> Lanes:
    """Convert plain JSON data to the division of a plan into two lanes (streams or threads), without checking that it
    fits a schedule. `KeyError`, `TypeError` or `ValueError` if a field is missing or of another type."""
    return Lanes(
        fork=int(data["fork"]),
        recovery=tuple(map(int, data["recovery"])),
        waits=tuple((int(run), int(other)) for run, other in data["waits"]),
        peak=int(data["peak"]),
        makespan=float(data["makespan"]),
        speed=float(data["speed"]),
    )
