"""Simulated annealing of schedules with recomputation, for any DAG: of a sequence of runs (op executions).

For the same seed and number of moves, the result is the same. `bounds` proves how far it is from the optimum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.annealing.anneal_loop import anneal
from rematplan.planner.annealing.dead_runs import tidy
from rematplan.planner.annealing.edits import link
from rematplan.planner.annealing.problem_arrays import EXACT, problem_arrays, recipes
from rematplan.planner.annealing.recompute_chains import CHAIN
from rematplan.planner.annealing.state import (
    BEST,
    BEST_COST,
    BUDGET,
    CEILING,
    COST,
    FREE,
    GROWTH,
    HALF,
    NO_CAP,
    NO_RUN,
    NUMBERS,
    PENALTY,
    PRICE,
    RUNS,
    VALUES,
    Links,
    Problem,
    State,
    end_of,
)
from rematplan.planner.caches.numba_kernels import kernel
from rematplan.planner.core.array_types import Ints
from rematplan.planner.core.effort import Effort

LOG = 4096
ALL_MOVES, SHIFTS_ONLY, UNTIL_FEASIBLE = range(3)


class Annealer:
    """Simulated annealing of one sequence of runs: `load` it with a budget, `cool` it in several calls, take
    the `best`.

    ``keep_order``: whether first runs keep the problem's order.
    """

    def __init__(self, graph: TrainingGraph, seed: int = 0, keep_order: bool = False) -> None:
        known = recipes(graph, keep_order)
        self.graph, self.ops = graph, known.rows
        workspace = max((o.workspace for o in (*graph.ops, *graph.inverses)), default=0)
        # Bytes in a unit: 1, unless all sizes sum to more than 2^52.
        self.unit = 1 + (sum(t.bytes for t in graph.tensors) + workspace) // EXACT
        self.number = {op.name: i for i, op in enumerate(self.ops)}
        self.must = [op.name for op, least in zip(self.ops, known.least, strict=True) if least]
        self.problem = problem_arrays(graph, known, self.unit, keep_order)
        self._by_cost = np.argsort(-self.problem.cost[:-1], kind="stable")
        self.fixed = graph.input_bytes
        self.random = np.array([seed & (2**64 - 1)], dtype=np.uint64)
        self.state: State
        self.priced = graph.base_cost > 0
        self.mean_cost = float(self.problem.cost[:-1].mean()) if self.ops else 0.0
        self.mean_size = max(1.0, float(self.problem.size.mean())) if self.problem.size.size else 1.0

    def load(self, runs: Sequence[str], budget: int, price: float = 0.0) -> None:
        """Make ``runs`` the current sequence, within ``budget`` bytes or over them; the best sequence found so far is
        forgotten. Names that the annealer does not know are left out. ``price``: of a unit over the budget; 0 means a
        default."""
        sequence = [self.number[name] for name in runs if name in self.number]
        self._seat(np.array(sequence, dtype=np.int64), float((budget - self.fixed) // self.unit))
        value = self.state.value
        value[PRICE] = price or 20.0 / (max(1.0, value[BUDGET]) * max(1, len(self.ops)))

    def accepts(self, runs: Sequence[str]) -> bool:
        """Return whether `load` can start from ``runs``. All ops that must run must be there, first runs in the
        required order, each tensor written before it is read, and all outputs written. Names that `load` leaves out are
        ignored."""
        first: dict[str, int] = {}
        for at, name in enumerate(runs):
            first.setdefault(name, at)
        if any(name not in first for name in self.must) or not self._is_served(runs):
            return False
        after = self.problem.after
        return all(
            first[op.name] < first[self.ops[after[i]].name] for i, op in enumerate(self.ops) if after[i] >= 0
        )

    def _is_served(self, runs: Sequence[str]) -> bool:
        """Return whether each of ``runs`` reads only inputs and results of earlier runs, and all outputs are written.
        Names that `load` leaves out are ignored."""
        made = set(self.graph.inputs)
        for name in runs:
            if name in self.number:
                op = self.ops[self.number[name]]
                if not made.issuperset(op.reads):
                    return False
                made.update(op.writes)
        return made.issuperset(self.graph.outputs)

    def cool(self, moves: int, hot: float, cold: float, mode: int = ALL_MOVES) -> int:
        """Make up to ``moves`` random moves, while the temperature falls from ``hot`` to ``cold`` (percent of the base
        cost). Return how many; fewer if the arrays become too full.

        ``mode``: `ALL_MOVES`, `SHIFTS_ONLY` (of the order), or `UNTIL_FEASIBLE`, which ends as soon as the sequence is
        within the budget.
        """
        made = anneal(self.problem, self.state, moves, hot, cold, mode)
        self._reseat(self._sequence())
        return int(made)

    def cool_slice(self, effort: Effort, moves: int, hot: float, cold: float, mode: int = ALL_MOVES) -> int:
        """Make up to ``moves`` random moves by `cool`, add them and their CPU time to ``effort``, and return how many
        were made."""
        clock = time.thread_time()
        made = self.cool(moves, hot, cold, mode)
        effort.made(made, time.thread_time() - clock)
        return made

    def limit_price(self, most: float) -> None:
        """Limit the price of a unit over the budget, in percent of the base cost, until the next limit or `load`."""
        self.state.value[CEILING] = most

    def limit_growth(self, growth: float) -> None:
        """Limit the factor by which the price of bytes over the budget rises per move, until the next limit
        or `load`.
        """
        self.state.value[GROWTH] = growth

    def set_price(self, price: float) -> None:
        """Set the price of a unit over the budget, in percent of the base cost. Annealing may lower it, but
        not raise it.
        """
        self.state.value[PRICE] = self.state.value[CEILING] = price

    def tidied(self, runs: Sequence[str], budget: int) -> list[str]:
        """Return ``runs`` without those that can be removed within ``budget`` bytes, and make the result the current
        sequence. If ``runs`` exceed the budget, only names that `load` does not know are left out."""
        self.load(runs, budget)
        tidy(self.problem, self.state, self._by_cost)
        return self.current()

    @property
    def price(self) -> float:
        """The price of a unit over the budget at one run, in percent of the base cost."""
        return float(self.state.value[PRICE])

    @property
    def feasible(self) -> bool:
        """Whether a sequence within the budget has been found since the last `load`, the loaded sequence included."""
        return bool(self.state.number[BEST])

    @property
    def best_overhead(self) -> float:
        """The overhead of the cheapest sequence within the budget since `load`; infinite if there is none, 0
        without costs.
        """
        return float(self.state.value[BEST_COST]) / 100 - 1 if self.priced else 0.0

    @property
    def penalty(self) -> float:
        """The bytes by which the current sequence exceeds the budget, summed over its runs, in units of ``unit``
        bytes."""
        return float(self.state.value[PENALTY])

    @property
    def peak(self) -> int:
        """The peak of the current sequence in bytes, rounded up to units of ``unit`` bytes."""
        over = self.state.mem - self.state.cap  # far below 0 in empty slots
        return self.fixed + int(self.state.value[BUDGET] + over.max()) * self.unit

    def best(self) -> list[str]:
        """Return the cheapest sequence within the budget since the last `load`, as names of ops and inverses. It is
        empty if none was found."""
        return self._names(self.state.best[: self.state.number[BEST]])

    def current(self) -> list[str]:
        """Return the current sequence as names of ops and inverses, whether or not it is within the budget."""
        return self._names(self._sequence())

    def _names(self, sequence: Ints) -> list[str]:
        return [self.ops[i].name for i in sequence if i < len(self.ops)]

    def _sequence(self) -> Ints:
        state = self.state
        nodes = state.at[state.at >= 0]
        return state.op[nodes][:-1]

    def _reseat(self, sequence: Ints) -> None:
        """Load a sequence again in arrays of its length, with the budget, prices and best sequence of before."""
        old = self.state
        self._seat(sequence, float(old.value[BUDGET]))
        new = self.state
        kept = [PRICE, CEILING, GROWTH]
        new.value[kept] = old.value[kept]
        if old.number[BEST] and old.value[BEST_COST] < new.value[BEST_COST]:
            length = old.number[BEST]
            if length > new.best.size:  # the cheapest sequence may be much longer than the present one
                self.state = new = new._replace(best=old.best)
            else:
                new.best[:length] = old.best[:length]
            new.number[BEST] = length
            new.value[BEST_COST] = old.value[BEST_COST]

    def _seat(self, sequence: Ints, budget: float) -> None:
        """Make a sequence (positions of ops) the current one, and the best one if it is within ``budget``, in units."""
        self.state = _new_state(self.problem, np.append(sequence, len(self.ops)), budget, self.random)
        value, number = self.state.value, self.state.number
        if value[PENALTY] < HALF:
            value[BEST_COST] = value[COST]
            number[BEST] = len(sequence) + 1
            self.state.best[: len(sequence)] = sequence
            self.state.best[len(sequence)] = len(self.ops)


def compile_annealer() -> None:
    """Compile the annealer's numba loops, or load them from the cache on disk, by running a tiny problem."""
    tensors = (Tensor("a", 1), Tensor("b", 1))
    ops = (Op("a", (), ("a",), 1.0), Op("b", ("a",), ("b",), 1.0))
    annealer = Annealer(TrainingGraph("two ops", tensors, (), ("b",), ops))
    annealer.load(["a", "b"], 2)
    annealer.cool(1, 1.0, 1.0)
    annealer.tidied(["a", "b"], 2)


def _new_state(problem: Problem, sequence: Ints, budget: float, random: np.ndarray) -> State:
    """Return the annealer's arrays for a sequence of op indices, spread evenly over 1.5 to 2 times as many slots (more
    for fewer than 256 ops). The last index is the virtual op that reads outputs. ``budget``: in the annealer's
    units."""
    ops, length = problem.cost.size, sequence.size
    nodes = 2 * length + max(2 * ops, 256)
    slots = 3 * length // 2 + max(ops // 2, 128)

    def ints(n: int, fill: int = -1) -> Ints:
        return np.full(n, fill, dtype=np.int64)

    state = State(
        links=Links(
            slot=ints(nodes), prev=ints(nodes), next=ints(nodes),
            first=ints(ops), last=ints(2 * ops),
        ),
        op=ints(nodes), runs=ints(ops, 0), place=ints(ops), stamp=ints(ops, 0),
        at=ints(slots), mem=np.zeros(slots), cap=np.full(slots, NO_CAP),
        free=np.arange(nodes - 1, -1, -1, dtype=np.int64), log=np.zeros((LOG, 3), dtype=np.int64),
        multi=ints(ops), chain=ints(2 * CHAIN), queue=ints(LOG), best=ints(nodes),
        number=ints(len(NUMBERS), 0), value=np.zeros(len(VALUES)), random=random,
    )  # fmt: skip
    state.value[BUDGET], state.value[[BEST_COST, CEILING, GROWTH]] = budget, np.inf
    state.number[FREE] = nodes
    _fill(problem, state, sequence)
    return state


@kernel
def _fill(P: Problem, S: State, sequence: Ints) -> None:
    """Put the op indices ``sequence`` into the empty state ``S``, evenly spread, and compute live bytes, cost and bytes
    over the budget."""
    n, length = S.at.size, sequence.size
    for k in range(length):
        op, slot = sequence[k], (k + 1) * (n - 1) // length
        S.number[FREE] -= 1
        node = S.free[S.number[FREE]]
        S.op[node], S.links.slot[node], S.at[slot] = op, slot, node
        link(P, S, node, op, S.links.last[op])
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
    """Compute ``S.mem``, the live bytes at each slot: a tensor is live from a run that writes it to its last read
    before it is written again."""
    n = S.at.size
    change = np.zeros(n + 1)
    for s in range(n):
        node = S.at[s]
        if node >= 0:
            op = S.op[node]
            for k in range(P.writes_at[op], P.writes_at[op + 1]):
                t = P.writes[k]
                change[s] += P.size[t]
                change[end_of(P.flow, S.links, t, node, NO_RUN) + 1] -= P.size[t]
    alive = 0.0
    for s in range(n):
        alive += change[s]
        S.mem[s] = alive
