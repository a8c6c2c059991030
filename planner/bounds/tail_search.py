"""Prove that each schedule has at least some overhead, by a search back in time from its end over what must be resident
at cuts; proof in docs/lower-bound.md.

It is exact where few sets of tensors fit, as late in the backward half at low
budgets. Linear relaxations are weak there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import Precedence
from rematplan.planner.bounds.max_flow import CutNetwork
from rematplan.planner.bounds.tail_kernels import (
    EITHER,
    HELD,
    MADE,
    NEITHER,
    Interval,
    States,
    step_back,
    undominated,
)
from rematplan.planner.core.array_types import Words
from rematplan.planner.core.effort import Effort

LARGE = 8
"""Tensors of more bytes than the largest one's, divided by this, are tracked."""
STATES = 1 << 15
"""With so many states at a cut the search gives up."""
TRIAL, BRANCHES = 12_000_000, 60_000_000
"""The most branches of one attempt to prove an overhead: while nothing has been proven, and after that. The second
number takes about a second."""
FLOW = 25_000
"""The number of branches that stand for the bound of one state's runs before a cut. If the first step needs many such
bounds, integer programs prove more in that time (ResNet-50 at 20 %)."""
BRANCHES_PER_MOVE = 300
"""The number of branches that count as one move."""
FEW, NEAR = 256, 0.03
"""The runs before a cut are bounded for each state if there are at most so many states. The cheapest one must also be
so near to the overhead that is to be proven."""
NOTHING_LENT = 1e30
"""The cost of a lent byte if no output can be made again."""
STEP, LONGEST_STEP, LAST_STEP = 0.01, 0.025, 0.002
"""The first, the largest and the smallest increase of the overhead that is to be proven."""


class TailSearch:
    """The search over the ops ``cuts``, each of which must precede the next, in a problem without inverses. All costs
    are shares of the base cost.

    ``first``: an op that must precede them, whose cut bounds what is recomputed before each of them.
    """

    def __init__(
        self, graph: TrainingGraph, order: Precedence, cuts: Sequence[int], first: int, budget: int
    ) -> None:
        """Choose the tensors to track: those of more than the largest one's bytes ÷ `LARGE`. Ops of ``never_rerun``
        have infinite cost."""
        self.graph, self.order, self.cuts, self.first, self.budget = graph, order, cuts, first, budget
        inputs, once = set(graph.inputs), set(graph.never_rerun)
        self.maker = {t: makers[0] for t, makers in order.makers.items() if t not in inputs}
        least = max((graph.size[t] for t in self.maker), default=0) / LARGE
        self.tracked = sorted((t for t in self.maker if graph.size[t] > least), key=self.maker.__getitem__)
        self.number = {t: k for k, t in enumerate(self.tracked)}
        self.cost = [math.inf if op.name in once else op.cost / graph.base_cost for op in graph.ops]
        self.small, self.rate = self._small_outputs()
        self.earliest = [
            max((j for j, b in enumerate(cuts) if before >> b & 1), default=-1)
            for before in order.before[: len(graph.ops)]
        ]
        self._before: dict[tuple[int, tuple[str, ...]], float] = {}
        self._networks: dict[int, tuple[CutNetwork, float]] = {}

    def _small_outputs(self) -> tuple[list[str], float]:
        """Return the outputs that are not tracked but count as resident once they must have been made. Second result:
        the least cost of making a byte of them again; `NOTHING_LENT` if none can be made again."""
        price = {
            t: self.cost[self.maker[t]] / self.graph.size[t]
            for t in self.graph.outputs
            if t in self.maker and t not in self.number and self.graph.size[t] and self.cost[self.maker[t]]
        }
        ranked = sorted(price, key=price.__getitem__, reverse=True)
        left = accumulate(self.graph.size[t] for t in ranked)
        # Those that are cheap for their bytes are left out if the others are then worth more in sum.
        worth = [
            price[t] * bytes_ if price[t] < math.inf else 0.0 for t, bytes_ in zip(ranked, left, strict=True)
        ]
        chosen = ranked[: max(range(len(worth)), key=worth.__getitem__, default=-1) + 1]
        return chosen, min((price[t] for t in chosen if price[t] < math.inf), default=NOTHING_LENT)

    def proves(self, overhead: float, most: int, effort: Effort | None = None) -> tuple[bool, int]:
        """Return whether it is proven that each schedule has at least this overhead, and the branches looked at. If
        ``most`` branches, `STATES` states or ``effort`` do not suffice, return (False, ``most``)."""
        # A schedule with the overhead h costs 1 + h; what is beyond one run of each needed op is run again.
        rate, looked, again = self.rate, 0, overhead + 1 - self._once(self.order.needed)
        states = States(self._sets([self.graph.outputs]), np.zeros(1), np.zeros(1, np.int64))
        for i in reversed(range(len(self.cuts))):
            limit = again - self.before(i)
            states, more = step_back(states, self._interval(i), rate, limit, STATES, most - looked)
            if more < 0 or (effort is not None and effort.over):
                return False, most
            looked += more
            states = undominated(states, rate)
            states = states._replace(sets=states.sets | self._sets([self.graph.ops[self.cuts[i]].reads]))
            total = states.costs + rate * states.lent
            if total.size <= FEW and limit - total.min(initial=limit) < NEAR:
                held = [self._tensors(row) for row in states.sets]
                looked += FLOW * sum((i, h) not in self._before for h in held)
                if looked > most:
                    return False, most
                open_ = np.array(
                    [self.before(i, h) + c < again for h, c in zip(held, total, strict=True)], np.bool_
                )
                states = States(states.sets[open_], states.costs[open_], states.lent[open_])
            if not states.costs.size:
                return True, looked
        return False, looked

    def before(self, i: int, held: tuple[str, ...] = ()) -> float:
        """Return a lower bound of the cost of what is run again before cut ``i``, as a share of running each op once.
        ``held``: tensors that are resident just before the cut. Bounds are kept for later calls."""
        key, first = (i, held), self.first
        if first == self.cuts[i]:
            return 0.0
        if i not in self._networks:
            until = replace(self.order, needed=self.order.before[self.cuts[i]])
            self._networks[i] = CutNetwork(self.graph, until, first), self._once(until.needed)
        if key not in self._before:
            network, once = self._networks[i]
            floor = network.holding(held).overhead(self.budget)
            self._before[key] = max(0.0, floor + 1 - once)
        return self._before[key]

    def _once(self, ops: int) -> float:
        """Return the cost of running each op of a bit mask once."""
        costs = (op.cost for v, op in enumerate(self.graph.ops) if ops >> v & 1)
        return math.fsum(costs) / self.graph.base_cost

    def _interval(self, i: int) -> Interval:
        """Return what can happen from cut ``i`` to the next one, or to the end."""
        graph, cut = self.graph, self.cuts[i]
        op, before = graph.ops[cut], self.order.before[cut]
        until = self.order.before[self.cuts[i + 1]] if i + 1 < len(self.cuts) else self.order.needed
        must = [
            t for v, at in enumerate(self.earliest) if at == i and until >> v & 1 for t in graph.ops[v].reads
        ]
        here = {*op.reads, *op.writes}.difference(graph.inputs)
        room = self.budget - graph.input_bytes - op.workspace - sum(graph.size[t] for t in here)
        room -= sum(graph.size[t] for t in self.small if t not in here and before >> self.maker[t] & 1)
        lenders = {self.maker[t] for t in self.small} if self.rate < NOTHING_LENT else set()
        kind, charge, loan = [], [], []
        for t in self.tracked:
            v = self.maker[t]
            at = self.earliest[v]
            kind.append(HELD if t in op.reads else EITHER if at < i else MADE if at == i else NEITHER)
            again = self.cost[v] if before >> v & 1 else 0.0
            lends = v in lenders and again < math.inf
            charge.append(0.0 if lends else again)
            loan.append(int(again / self.rate) if lends else 0)
        makers = [graph.ops[self.maker[t]] for t in self.tracked]
        return Interval(
            kind=np.array(kind, np.int64),
            charge=np.array(charge, np.float64),
            loan=np.array(loan, np.int64),
            size=np.array([graph.size[t] for t in self.tracked], np.int64),
            reads=self._sets([m.reads for m in makers]),
            together=self._sets([m.writes for m in makers]),
            must=self._sets([must]),
            room=room,
        )

    def _sets(self, rows: Sequence[Sequence[str]]) -> Words:
        words = len(self.tracked) // 64 + 1
        sets = np.zeros((len(rows), words), np.uint64)
        for row, tensors in enumerate(rows):
            for t in tensors:
                if (k := self.number.get(t, -1)) >= 0:
                    sets[row, k // 64] |= np.uint64(1 << k % 64)
        return sets

    def _tensors(self, row: Words) -> tuple[str, ...]:
        return tuple(t for k, t in enumerate(self.tracked) if int(row[k // 64]) >> k % 64 & 1)


def highest_proven(search: TailSearch, known: float, effort: Effort) -> float:
    """Return the highest overhead that is proven within ``effort``, at least ``known``. Steps become longer until the
    first failure, and shorter with each failure. The search ends if the first step fails or steps are too short."""
    step, useful, failed = STEP, False, False
    while step >= LAST_STEP and not effort.over:
        proven, looked = search.proves(known + step, BRANCHES if useful else TRIAL, effort)
        effort.charge(moves=looked // BRANCHES_PER_MOVE)
        known += step if proven else 0.0
        useful, failed = useful or proven, failed or not proven
        if not useful:
            break
        step = min(1.5 * step, LONGEST_STEP) if not failed else step if proven else step / 4
    return known
