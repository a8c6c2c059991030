"""A lower bound of the overhead from one cut, by maximum flows within milliseconds; proof in
docs/lower-bound.md.

The memory row of `multi_cut_program` for one cut at op b becomes a price λ ≥ 0 per byte resident before b
(Lagrangian relaxation):

    L(λ) = Σ c_v − λ·R + min over y of Σ c_v y_v + λ Σ m_t h_t
    h_t = 1 if an op that reads t has y = 1 and the op that writes t has y = 0

R: the budget without the inputs and b's working set. y_v = 1: op v of cost c_v runs after b, again if it must
precede b, else free of cost; tensor t has m_t bytes. For each λ the minimum is a minimum cut. The maximum of
L equals the optimum of the linear relaxation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import Precedence, working_sets
from rematplan.planner.core.array_types import Floats, Ints

SCALE = 2.0**40
"""The cost of running each op once, in units of capacity. Capacities are integers, rounded down."""
MAX_SCALE = 1e300
"""The largest factor from costs to units of capacity, so that it is finite for tiny costs."""
NEVER = 2.0
"""The cost assigned to running again an op that may run only once, as a multiple of the cost of running each op once.
No schedule repeats such an op."""
LARGEST = 2.0**62
"""The largest sum of capacities, so that sums fit into 64 bits."""
STEPS = 40
"""The largest number of prices tried at a cut; about a dozen suffice."""

Ints32 = NDArray[np.int32]


def least_cut(tails: Ints32, heads: Ints32, capacity: Ints) -> int:
    """Return the capacity of a minimum cut between node 0 and node 1 of a network; 0 if the solver fails.

    ``tails``, ``heads``: the nodes of each arc.
    """
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, capacity)
    status = flow.solve(0, 1)
    return int(flow.optimal_flow()) if status == flow.OPTIMAL else 0


@dataclass(frozen=True)
class Minimum:
    """A minimum cut of the network of one cut op, at a price λ for each byte resident before it."""

    floor: float
    """A lower bound, for all schedules, of cost plus λ times the bytes resident before the cut op; only if the
    network's ``slope`` is 0."""
    cost: float
    """The cost of schedules that run the ops ``again`` after the cut op, in the unit of `Op.cost`."""
    resident: float
    """The bytes resident before the cut op in these schedules, without inputs and what that op reads."""
    again: tuple[int, ...]
    """The positions in ``graph.ops`` of the ops that run after the cut op although they can run before it. Those of
    them that must precede the cut op run both before and after it."""


class CutNetwork:
    """The flow network of one cut op. Its minimum cut says which ops run after it, and so which tensors are resident
    before. ``slope``: if positive, ops cost up to this share more, the later the more, and `Minimum.floor` is no
    bound."""

    def __init__(
        self,
        graph: TrainingGraph,
        order: Precedence,
        cut: int,
        slope: float = 0.0,
    ) -> None:
        """Give each needed op that can run before op ``cut`` a node, and lay the arcs. ``cut``: a position in
        ``graph.ops``."""
        # Node 0 is the source: the ops that cannot run before the cut op. Node 1 is the sink. Other ops are
        # on the source's side if they run after it. With a ``slope``, costs rise from the first op to the
        # last, so that equal blocks are recomputed one after another as the price rises; a proven bound needs 0.
        self.base_cost, self.held = graph.base_cost, graph.input_bytes + working_sets(graph)[cut]
        self.scale = min(SCALE / graph.base_cost, MAX_SCALE)
        needed = [v for v in range(len(graph.ops)) if order.needed >> v & 1]
        self.constant = math.fsum(graph.ops[v].cost for v in needed)
        earlier, once = order.before[cut], set(graph.never_rerun)
        side: dict[int, int] = {}  # position of an op -> its node
        # For each op with a node, the cost of running it after the cut op; 0 if it need not run before.
        priced: list[float] = []
        self.ops = []
        for v in needed:
            if v == cut or order.before[v] >> cut & 1:
                side[v] = 0
            else:
                side[v] = 2 + len(priced)
                rise = 1 + slope * v / len(graph.ops)
                dear = NEVER * graph.base_cost if graph.ops[v].name in once else 0.0
                priced.append(rise * graph.ops[v].cost + dear if earlier >> v & 1 else 0.0)
                self.ops.append(v)
        self._lay(graph, side, set(graph.ops[cut].reads), priced)

    def _lay(
        self, graph: TrainingGraph, side: dict[int, int], resident: set[str], priced: list[float]
    ) -> None:
        """Set ``tails``, ``heads``, ``cost`` and ``bytes`` of the network's arcs. ``side``: by an op's position, its
        node, 0 if it cannot run before the cut. ``resident``: tensors without a node, since the cut op reads them.
        ``priced``: the costs of nodes 2 and later."""
        # From op to sink: the cost of running it after the cut op. From op to tensor read: infinite (bytes
        # -1). From tensor to its writer: its bytes.
        # What an op with a node writes: the network of `holding` needs tensors that nothing reads before, too.
        written = [(t, node) for v, node in side.items() if node for t in graph.ops[v].writes]
        makers = {t: node for t, node in written if t not in resident}
        holders = {t: 2 + len(priced) + k for k, t in enumerate(makers)}
        read = [(node, holders[t]) for v, node in side.items() for t in graph.ops[v].reads if t in holders]
        tails = [*holders.values(), *(node for node, _ in read)]
        heads = [*makers.values(), *(holder for _, holder in read)]
        sizes = [*(graph.size[t] for t in makers), *[-1] * len(read)]
        count = len(priced)
        self._holders = holders
        self.tails = np.array([*range(2, 2 + count), *tails], dtype=np.int32)
        self.heads = np.array([*[1] * count, *heads], dtype=np.int32)
        self.cost = np.array([*priced, *[0.0] * len(tails)])
        self.bytes = np.array([*[0] * count, *sizes], dtype=np.int64)

    def holding(self, tensors: Sequence[str]) -> CutNetwork:
        """Return the network in which those of ``tensors`` that are written before the cut op are needed after it."""
        nodes = [self._holders[t] for t in tensors if t in self._holders]
        network = copy(self)
        network.tails = np.append(self.tails, np.zeros(len(nodes), np.int32))
        network.heads = np.append(self.heads, np.array(nodes, np.int32))
        network.cost = np.append(self.cost, np.zeros(len(nodes)))
        network.bytes = np.append(self.bytes, np.full(len(nodes), -1))
        return network

    def overhead(self, budget: int) -> float:
        """Return the bound of the overhead within ``budget`` bytes that the cut proves, if there are no inverses and
        ``slope`` is 0. It is infinite if no schedule fits, and -1 if sums would overflow."""
        room = budget - self.held
        if room < 0:
            return math.inf
        low, high = self.minimum(0.0), self._fewest_bytes()
        if low is None or high is None:
            return -1.0
        value = low.floor
        if low.resident > room and high.resident > room:
            return math.inf
        for _ in range(STEPS):
            if low.resident <= high.resident or low.resident <= room:
                break
            price = (high.cost - low.cost) / (low.resident - high.resident)
            middle = self.minimum(price)
            if middle is None:
                break
            value = max(value, middle.floor - price * room)
            if middle.resident >= low.resident or middle.resident <= high.resident:
                break
            low, high = (middle, high) if middle.resident > room else (low, middle)
        return value / self.base_cost - 1

    def minimum(self, price: float) -> Minimum | None:
        """Return the minimum cut if a resident byte costs ``price`` (`Op.cost` per byte); None if capacities would
        overflow or the solver fails."""
        capacity = (self.cost + price * np.maximum(self.bytes, 0)) * self.scale
        return self._cut(capacity, uncut=float(np.floor(self.cost * self.scale).sum()) + 1, scale=self.scale)

    def _fewest_bytes(self) -> Minimum | None:
        """Return the minimum cut with the fewest resident bytes at any cost, with a meaningless ``floor``; None if
        bytes would overflow or the solver fails."""
        capacity = np.maximum(self.bytes, 0).astype(np.float64)
        return self._cut(capacity, uncut=float(capacity.sum()) + 1, scale=1.0)

    def _cut(self, capacity: Floats, uncut: float, scale: float) -> Minimum | None:
        """Return the minimum cut; None if sums of capacities would overflow or the solver fails. ``uncut``: the
        capacity of arcs that no cut has. ``scale``: capacity per unit of cost."""
        if uncut * max(1, len(capacity)) > LARGEST:
            return None
        whole = np.where(self.bytes < 0, uncut, np.minimum(capacity, uncut)).astype(np.int64)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(self.tails, self.heads, whole)
        if flow.solve(0, 1) != flow.OPTIMAL:
            return None
        chosen = np.zeros(2 + max(self.tails.max(initial=1), self.heads.max(initial=1)), dtype=np.bool_)
        chosen[flow.get_source_side_min_cut()] = True
        again = np.flatnonzero(chosen[2 : 2 + len(self.ops)])
        across = chosen[self.tails] & ~chosen[self.heads] & (self.bytes >= 0)
        return Minimum(
            floor=self.constant + flow.optimal_flow() / scale,
            cost=self.constant + float(self.cost[across].sum()),
            resident=float(self.bytes[across].sum()),
            again=tuple(self.ops[k] for k in again),
        )
