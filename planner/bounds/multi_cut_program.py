"""The multi-cut integer program, whose optimum bounds the cost of all schedules within a budget B from below;
proof in docs/lower-bound.md.

Each of the cuts b₁ … b_K must precede the next; τᵢ is bᵢ's first execution, interval i from τᵢ to just before
τᵢ₊₁. v, u are ops or inverses of cost c, t is a tensor of m_t bytes, L a set of tensors. All variables are 0
or 1:

    x[v,i] = v runs in interval i
    h[t,i] = t is resident just before τᵢ (at the end, for i = K + 1)
    min Σ c_v x[v,i]
    (read)    x[v,i] ≤ h[t,i] + Σ_{u writes t} x[u,i]          t read by v
    (hold)    h[t,i+1] ≤ h[t,i] + Σ_{u writes t} x[u,i]
    (first)   x[v,i] = 0 for i < j if bⱼ must precede v; x[bᵢ,i] = 1; Σ_{i<j} x[v,i] ≥ 1 if v must precede bⱼ
    (need)    Σᵢ x[v,i] ≥ 1 if every schedule must run v; h[t,K+1] = 1 for outputs t
    (once)    Σᵢ x[v,i] ≤ 1 if v may never run again
    (loop)    x[v,i] ≤ Σ_{t in L} h[t,i] + Σ_{u writes into L, reads none of it} x[u,i]    v reads and writes into L
    (memory)  Σ_{t not written by bᵢ} m_t h[t,i] ≤ B − inputs − writes and workspace of bᵢ;  h[t,i] = 1 for t read by bᵢ

(loop) excludes that tensors of L are computed from each other alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import Precedence
from rematplan.planner.ilp.sparse_rows import ONE, ZERO, Rows, Term

Loop = tuple[str, ...]


COST_UNIT = 1e-6
"""The unit of costs in the program: a millionth of the cost of running each op once. Costs are rounded down to
thousandths of this unit."""


class CutProgram:
    """The multi-cut integer program of the ops ``cuts``, each of which must precede the next, within ``budget`` bytes.
    ``tiny``: tensors of at most so many bytes count as always resident. ``loops``: sets of tensors to exclude by the
    rows (loop)."""

    def __init__(
        self,
        graph: TrainingGraph,
        order: Precedence,
        cuts: Sequence[int],
        budget: int,
        tiny: int,
        loops: Iterable[Loop] = (),
    ) -> None:
        """Create all variables and rows. Loops with a tensor that counts as always resident are left out."""
        self.graph, self.order, self.cuts = graph, order, cuts
        scale = 1e9 / graph.base_cost if graph.base_cost else 0.0
        self.cost = [math.floor(op.cost * scale) / 1e3 for op in order.recipes]
        self.room = budget - graph.input_bytes
        self.last = len(cuts)
        inputs = set(graph.inputs)
        # Tensors of at most ``tiny`` bytes count as always resident, which can only lower the optimum.
        self.free = {t for t in order.makers if graph.size[t] <= tiny}
        self.tracked = [t for t in order.makers if t not in self.free and t not in inputs]
        self.rows = Rows()
        self.earliest = [self._earliest(v) for v in range(len(order.recipes))]
        self.deadline = [self._deadline(v) for v in range(len(order.recipes))]
        # The variables of «v runs in interval i» and «t is resident just before cut i»; `ZERO` or `ONE` if
        # known.
        self.x: dict[tuple[int, int], int] = {}
        self.h: dict[tuple[str, int], int] = {}
        self._make_variables()
        self.loops = [loop for loop in loops if all((t, 0) in self.h for t in loop)]
        self._write_rows()
        self._write_suffix_rows()

    def _earliest(self, v: int) -> int:
        """Return the first interval (0 to K) in which ``v`` can run: after the last cut that must precede it."""
        return max((j + 1 for j, b in enumerate(self.cuts) if self.order.before[v] >> b & 1), default=0)

    def _deadline(self, v: int) -> int:
        """Return the first interval at whose start ``v`` must have run; K + 1: by the end, K + 2: it need not run."""
        for j, b in enumerate(self.cuts):
            if b != v and self.order.before[b] >> v & 1:
                return j + 1
        return self.last + (1 if self.order.needed >> v & 1 else 2)

    def _make_variables(self) -> None:
        """Create the variables x and h; those whose values are known become `ZERO` or `ONE`."""
        for v in range(len(self.order.recipes)):
            for i in range(self.last + 1):
                self.x[v, i] = self._x(v, i, self.cost[v])
        for t in self.tracked:
            first = min(self.earliest[v] for v in self.order.makers[t])
            for i in range(1, self.last + 2):
                self.h[t, i] = ZERO if i <= first else self.rows.variable(0.0)
            self.h[t, 0] = ZERO
        for i in range(1, self.last + 1):
            for t in self.order.recipes[self.cuts[i - 1]].reads:
                self._force(t, i)
        for t in self.graph.outputs:
            self._force(t, self.last + 1)

    def _x(self, v: int, i: int, cost: float) -> int:
        """Return the variable x[v,i]: `ZERO` if v cannot run in interval i, `ONE` if it must, and else a new one. The
        cost of a run that must be is added to the constant."""
        if i < self.earliest[v]:
            return ZERO
        if i == self.earliest[v] and (v in self.cuts or self.deadline[v] == i + 1):
            self.rows.constant += cost
            return ONE
        return self.rows.variable(cost)

    def _force(self, tensor: str, i: int) -> None:
        """Set h[tensor,i] to `ONE` if the tensor is tracked. If it was `ZERO`, the program is marked as impossible."""
        if (tensor, i) in self.h:
            self.rows.impossible |= self.h[tensor, i] == ZERO
            self.h[tensor, i] = ONE

    def _write_rows(self) -> None:
        """Add the rows of x and h that the module describes."""
        once = set(self.graph.never_rerun)
        for v, op in enumerate(self.order.recipes):
            if op.name in once:
                self._row([(self.x[v, i], -1.0) for i in range(self.last + 1)], -1.0)
            if self.deadline[v] <= self.last + 1:
                self._row([(self.x[v, i], 1.0) for i in range(min(self.deadline[v], self.last + 1))], 1.0)
            for i in range(self.earliest[v], self.last + 1):
                for t in op.reads:
                    if (t, i) in self.h:
                        self._row([(self.h[t, i], 1.0), *self._made(t, i), (self.x[v, i], -1.0)], 0.0)
        for t in self.tracked:
            for i in range(self.last + 1):
                self._row([(self.h[t, i], 1.0), *self._made(t, i), (self.h[t, i + 1], -1.0)], 0.0)
        for loop in self.loops:
            for i in range(self.last + 1):
                self._support(loop, i, self.x)
        for i in range(1, self.last + 2):
            self._memory(i)

    def _support(self, loop: Loop, i: int, runs: Mapping[tuple[int, int], int]) -> None:
        """Add rows that exclude a loop in interval ``i``. ``runs``: the variable of each op or inverse and
        interval.
        """
        makers = {u for t in loop for u in self.order.makers[t]}
        inner = {u for u in makers if not set(loop).isdisjoint(self.order.recipes[u].reads)}
        sources = [(self.h[t, i], 1.0) for t in loop] + [(runs[u, i], 1.0) for u in sorted(makers - inner)]
        # To run, one of the loop's tensors must be resident, or written by what reads none of them.
        for v in sorted(inner):
            self._row([*sources, (runs[v, i], -1.0)], 0.0)

    def _write_suffix_rows(self) -> None:
        """Add variables y[v,i] = «v runs in interval i or later», and rows like those of x[v,i]."""
        # They strengthen the linear relaxation: else a half-resident tensor serves half an execution in each
        # interval.
        y = {(v, self.last): self.x[v, self.last] for v in range(len(self.order.recipes))}
        for i in range(self.last - 1, 0, -1):
            for v in range(len(self.order.recipes)):
                y[v, i] = self._suffix(v, i, y[v, i + 1])
            for v, op in enumerate(self.order.recipes):
                for t in op.reads:
                    if (t, i) in self.h:
                        made = [(y[u, i], 1.0) for u in self.order.makers[t]]
                        self._row([(self.h[t, i], 1.0), *made, (y[v, i], -1.0)], 0.0)
            for loop in self.loops:
                self._support(loop, i, y)

    def _suffix(self, v: int, i: int, after: int) -> int:
        """Return the variable y[v,i], created with its rows, or `ZERO` or `ONE` if its value is known. ``after``:
        y[v,i+1]."""
        runs = [self.x[v, j] for j in range(i, self.last + 1)]
        if ONE in runs or (self.earliest[v] >= i and self.order.needed >> v & 1):
            return ONE
        if all(j == ZERO for j in runs):
            return ZERO
        y = self.rows.variable(0.0)
        self._row([(j, 1.0) for j in runs] + [(y, -1.0)], 0.0)
        self._row([(y, 1.0), (after, -1.0)], 0.0)
        self._row([(y, 1.0), (self.x[v, i], -1.0)], 0.0)
        return y

    def _made(self, tensor: str, i: int) -> list[Term]:
        return [(self.x[u, i], 1.0) for u in self.order.makers[tensor]]

    def _memory(self, i: int) -> None:
        """Add the row (memory) of cut ``i``, or of the end. If it cannot hold, the program is marked as impossible."""
        room, size = self.room, self.graph.size
        written: set[str] = set()
        if i <= self.last:
            # While the cut op runs, its writes are resident, whether they were resident before or not.
            cut = self.order.recipes[self.cuts[i - 1]]
            written.update(cut.writes)
            room -= cut.workspace + sum(size[t] for t in written)
        counted = [t for t in self.tracked if t not in written]
        room -= sum(size[t] for t in counted if self.h[t, i] == ONE)
        if room < 0:
            self.rows.impossible = True
            return
        resident = [(self.h[t, i], -float(size[t])) for t in counted if self.h[t, i] >= 0 and size[t]]
        scale = max((-m for _, m in resident), default=1.0)
        self._row([(j, m / scale) for j, m in resident], -room / scale)

    def _row(self, terms: list[Term], floor: float) -> None:
        """Add the row Σ factor · variable ≥ ``floor`` if it can fail. A row that cannot hold marks the
        program as impossible.
        """
        open_terms = [(j, a) for j, a in terms if j >= 0]
        floor -= sum(a for j, a in terms if j == ONE)
        if sum(min(a, 0.0) for _, a in open_terms) >= floor:
            return
        if sum(max(a, 0.0) for _, a in open_terms) < floor - 1e-9:
            self.rows.impossible = True
        self.rows.at_least(open_terms, floor)
