"""Annealing of the op sequence itself: a whole-schedule planner for any DAG.

`Annealer` holds one sequence and cools it in slices, so that progress is shown and an interruption or a time
limit still leaves the best feasible sequence found. Moves and state are in `sequence_moves` and
`sequence_state`.

Guarantees: every sequence it returns is a valid plan within the budget (the simulator has the last word in
the caller); given a seed and a number of moves the result is the same on every run. No guarantee of
optimality: see `bounds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.kernel import kernel
from rematplan.planner.sequence_moves import anneal
from rematplan.planner.sequence_state import (
    BEST,
    BEST_COST,
    BUDGET,
    COST,
    FREE,
    HALF,
    NO_CAP,
    OVERFLOW,
    PENALTY,
    PRICE,
    RUNS,
    Ints,
    Problem,
    State,
    link,
)
from rematplan.planner.sequence_tidy import tidy

EXACT = 2**52
"""Sizes are summed in float64; larger problems are counted in coarser units: sizes up, budgets down."""

LOG = 4096
ALL_MOVES, SHIFTS_ONLY, UNTIL_FEASIBLE = range(3)


def needed_ops(graph: TrainingGraph) -> list[Op]:
    """The ops that must run, in the base order: those that an output depends on, those that draw random
    numbers, those that write nothing (they are there for what they do), and whatever these depend on."""
    ordered = set(graph.ordered)
    wanted = set(graph.outputs)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if not op.writes or op.name in ordered or not wanted.isdisjoint(op.writes):
            kept.append(op)
            wanted.update(op.reads)
    return kept[::-1]


class Annealer:
    """One op sequence being cooled.

    ``keep_order``: first runs keep the base order. Sizes in ``unit`` bytes (1 unless sizes sum beyond 2^52).
    """

    def __init__(self, graph: TrainingGraph, seed: int = 0, keep_order: bool = False) -> None:
        self.ops = needed_ops(graph)
        self.unit = (
            1
            + (sum(t.bytes for t in graph.tensors) + max((o.workspace for o in graph.ops), default=0))
            // EXACT
        )
        self.number = {op.name: i for i, op in enumerate(self.ops)}
        self.problem = _problem(graph, self.ops, self.unit, keep_order)
        self._by_cost = np.argsort(-self.problem.cost[:-1], kind="stable")
        self.inverses = {op.name for op in graph.inverses}
        self.fixed = graph.input_bytes
        self.random = np.array([seed & (2**64 - 1)], dtype=np.uint64)
        self.state: State
        self.priced = graph.base_cost > 0
        self.overflows = 0

    def load(self, runs: Sequence[str], budget: int, price: float = 0.0) -> None:
        """Start from a sequence of runs (those of ops that nothing needs are left out), forgetting the best
        so far.

        ``price``: the penalty's, where an earlier search at about this budget has found it (`price`); else it
        starts low, and the start may be lost.
        """
        sequence = [self.number[name] for name in runs if name in self.number]
        self._seat(np.array(sequence, dtype=np.int64), float((budget - self.fixed) // self.unit))
        value = self.state.value
        value[PRICE] = price or 20.0 / (max(1.0, value[BUDGET]) * max(1, len(self.ops)))

    def accepts(self, runs: Sequence[str]) -> bool:
        """Whether a sequence can be a start: every needed op runs, no inverse does, and first runs are in the
        order that must be kept."""
        first: dict[str, int] = {}
        for at, name in enumerate(runs):
            first.setdefault(name, at)
        if any(name not in first for name in self.number) or any(name in self.inverses for name in first):
            return False
        after = self.problem.after
        return all(
            first[op.name] < first[self.ops[after[i]].name] for i, op in enumerate(self.ops) if after[i] >= 0
        )

    def cool(self, moves: int, hot: float, cold: float, mode: int = ALL_MOVES) -> int:
        """Make up to ``moves`` moves between two temperatures (percent of the base cost), then spread the
        runs anew. Returns the number of moves made."""
        made = anneal(self.problem, self.state, moves, hot, cold, mode)
        self._reseat(self._sequence())
        return int(made)

    def restart(self) -> None:
        """Go back to the best feasible sequence."""
        if self.feasible:
            self._reseat(self.state.best[: self.state.number[BEST] - 1].copy())  # without the virtual end

    def set_budget(self, budget: int) -> None:
        """Change the budget, forgetting the best so far."""
        old = self.state.value
        self._seat(self._sequence(), float((budget - self.fixed) // self.unit))
        self.state.value[PRICE] = old[PRICE]

    def tidied(self, runs: Sequence[str], budget: int) -> list[str]:
        """The sequence without the repeated runs that a budget does not need; itself if it is over the budget.

        Changes the present sequence.
        """
        self.load(runs, budget)
        tidy(self.problem, self.state, self._by_cost)
        return self.current()

    @property
    def price(self) -> float:
        """What a byte over the budget costs at present."""
        return float(self.state.value[PRICE])

    @property
    def feasible(self) -> bool:
        """Whether a sequence within the budget has been found since it was set."""
        return bool(self.state.number[BEST])

    @property
    def best_overhead(self) -> float:
        """Overhead of the best sequence; infinite if there is none."""
        return float(self.state.value[BEST_COST]) / 100 - 1 if self.priced else 0.0

    @property
    def penalty(self) -> float:
        """Σ of the bytes over the budget, over the runs of the present sequence."""
        return float(self.state.value[PENALTY])

    def best(self) -> list[str]:
        """The best feasible sequence of runs, or none."""
        return self._names(self.state.best[: self.state.number[BEST]])

    def current(self) -> list[str]:
        """The present sequence of runs, feasible or not."""
        return self._names(self._sequence())

    def _names(self, sequence: Ints) -> list[str]:
        return [self.ops[i].name for i in sequence if i < len(self.ops)]

    def _sequence(self) -> Ints:
        state = self.state
        nodes = state.at[state.at >= 0]
        return state.op[nodes][:-1]

    def _reseat(self, sequence: Ints) -> None:
        old = self.state
        self.overflows += int(old.number[OVERFLOW])
        self._seat(sequence, float(old.value[BUDGET]))
        new = self.state
        new.value[PRICE] = old.value[PRICE]
        if old.number[BEST] and old.value[BEST_COST] < new.value[BEST_COST]:
            length = old.number[BEST]
            new.best[:length] = old.best[:length]
            new.number[BEST] = length
            new.value[BEST_COST] = old.value[BEST_COST]

    def _seat(self, sequence: Ints, budget: float) -> None:
        self.state = _new_state(self.problem, np.append(sequence, len(self.ops)), budget, self.random)
        value, number = self.state.value, self.state.number
        if value[PENALTY] < HALF:
            value[BEST_COST] = value[COST]
            number[BEST] = len(sequence) + 1
            self.state.best[: len(sequence)] = sequence
            self.state.best[len(sequence)] = len(self.ops)


def compile_kernels() -> None:
    """Have the hot loops compiled (once a machine; loaded from the cache after), so that no time limit pays
    for it."""
    tensors = (Tensor("a", 1), Tensor("b", 1))
    ops = (Op("a", (), ("a",), 1.0), Op("b", ("a",), ("b",), 1.0))
    annealer = Annealer(TrainingGraph("two ops", tensors, (), ("b",), ops))
    annealer.load(["a", "b"], 2)
    annealer.cool(1, 1.0, 1.0)
    annealer.tidied(["a", "b"], 2)


def _problem(graph: TrainingGraph, ops: Sequence[Op], unit: int, keep_order: bool) -> Problem:
    """The needed ops and the virtual end, as arrays."""
    inputs = set(graph.inputs)
    names = [t for op in ops for t in op.writes]
    tensor = {t: i for i, t in enumerate(names)}
    reads = [[tensor[t] for t in dict.fromkeys(op.reads) if t not in inputs] for op in ops]
    reads.append([tensor[t] for t in graph.outputs if t not in inputs])
    writes = [[tensor[t] for t in op.writes] for op in ops] + [[]]
    readers: list[list[int]] = [[] for _ in names]
    for i, row in enumerate(reads):
        for t in row:
            readers[t].append(i)
    size = np.array([-(-graph.size[t] // unit) for t in names], dtype=np.float64)
    percent = 100.0 / graph.base_cost if graph.base_cost else 0.0
    ordered = {op.name for op in ops} if keep_order else set(graph.ordered)
    return Problem(
        *_rows(reads),
        *_rows(writes),
        *_rows(readers),
        producer=np.array([i for i, op in enumerate(ops) for _ in op.writes], dtype=np.int64),
        size=size,
        cost=np.array([op.cost * percent for op in ops] + [0.0]),
        workspace=np.array([float(-(-op.workspace // unit)) for op in ops] + [0.0]),
        written=np.array([float(size[row].sum()) if row else 0.0 for row in writes]),
        before=_neighbours(range(len(ops)), ops, ordered),
        after=_neighbours(reversed(range(len(ops))), ops, ordered),
    )


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Rows of different lengths as (starts, items)."""
    starts = np.array([0, *accumulate(map(len, rows))], dtype=np.int64)
    return starts, np.array([x for row in rows for x in row], dtype=np.int64)


def _neighbours(places: Iterable[int], ops: Sequence[Op], ordered: set[str]) -> Ints:
    """For each ordered op the one met last on the way, or -1."""
    found, last = np.full(len(ops) + 1, -1, dtype=np.int64), -1
    for i in places:
        if ops[i].name in ordered:
            found[i], last = last, i
    return found


def _new_state(problem: Problem, sequence: Ints, budget: float, random: np.ndarray) -> State:
    """A sequence (with the virtual end) seated in every second slot."""
    ops, length = problem.cost.size, sequence.size
    nodes = 2 * length + max(2 * ops, 256)
    slots = 2 * length + max(ops, 128)

    def ints(n: int, fill: int = -1) -> Ints:
        return np.full(n, fill, dtype=np.int64)

    state = State(
        op=ints(nodes), slot=ints(nodes), prev=ints(nodes), next=ints(nodes),
        first=ints(ops), last=ints(ops), runs=ints(ops, 0), place=ints(ops), stamp=ints(ops, 0),
        at=ints(slots), mem=np.zeros(slots), cap=np.full(slots, NO_CAP),
        free=np.arange(nodes - 1, -1, -1, dtype=np.int64), log=np.zeros((LOG, 3), dtype=np.int64),
        multi=ints(ops), chain=ints(64), queue=ints(LOG), best=ints(nodes),
        number=ints(6, 0), value=np.zeros(5), random=random,
    )  # fmt: skip
    state.value[BUDGET], state.value[BEST_COST] = budget, np.inf
    state.number[FREE] = nodes
    _fill(problem, state, sequence)
    return state


@kernel
def _fill(P: Problem, S: State, sequence: Ints) -> None:
    """Seat the runs and count what is alive in each slot."""
    n, length = S.at.size, sequence.size
    for k in range(length):
        op, slot = sequence[k], (k + 1) * (n - 1) // length
        S.number[FREE] -= 1
        node = S.free[S.number[FREE]]
        S.op[node], S.slot[node], S.at[slot] = op, slot, node
        link(S, node, op, S.last[op])
    S.number[RUNS] = length
    _count(P, S)
    for s in range(n):
        if S.at[s] >= 0:
            op = S.op[S.at[s]]
            S.cap[s] = S.value[BUDGET] - P.workspace[op]
            S.value[PENALTY] += max(0.0, S.mem[s] - S.cap[s])
            S.value[COST] += P.cost[op]


@kernel
def _count(P: Problem, S: State) -> None:
    """``mem`` from scratch: one step up where a copy begins, one down behind its last read."""
    n = S.at.size
    change = np.zeros(n + 1)
    for s in range(n):
        node = S.at[s]
        if node >= 0:
            op, later = S.op[node], S.next[node]
            stop = S.slot[later] if later >= 0 else n
            for k in range(P.writes_at[op], P.writes_at[op + 1]):
                t = P.writes[k]
                end = s
                for j in range(P.readers_at[t], P.readers_at[t + 1]):
                    reader = S.last[P.readers[j]]
                    while reader >= 0 and S.slot[reader] >= stop:
                        reader = S.prev[reader]
                    if reader >= 0:
                        end = max(end, S.slot[reader])
                change[s] += P.size[t]
                change[end + 1] -= P.size[t]
    alive = 0.0
    for s in range(n):
        alive += change[s]
        S.mem[s] = alive
