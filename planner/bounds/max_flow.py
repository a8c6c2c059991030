"""A lower bound of the overhead from one cut, computed by maximum flows within milliseconds. The proof is in
docs/lower-bound.md.

Take the integer program of `multi_cut_program` with one cut, at op b. Replace its memory row by a price λ ≥ 0 for
each byte that is resident just before b's first execution (a Lagrangian relaxation):

    L(λ) = Σ c_v − λ·R + min over y of Σ c_v y_v + λ Σ m_t h_t
    h_t = 1 if an op that reads t has y = 1 and the op that writes t has y = 0

R: the budget minus the bytes of the inputs and of b's reads, writes and workspace. c_v: the cost of op v. m_t: the
bytes of tensor t. y_v = 1: v runs after b's first execution. If v must precede b, it then runs again, which costs
c_v. If v need not precede b, y_v = 1 costs nothing. If v cannot run before b, y_v is 1.

For each λ the minimum is a minimum cut of a network. A maximum flow finds it, in milliseconds for ten thousand ops. L
is concave and piecewise linear, and its maximum equals the optimum of the program's linear relaxation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.precedence import Precedence, working_sets

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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


def least_cut(tails: Ints32, heads: Ints32, capacity: Ints) -> int:
    """Return the capacity of a minimum cut between node 0 and node 1 of a network.

    ``tails``, ``heads``: the nodes of each arc.
    """
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, capacity)
    status = flow.solve(0, 1)
    return int(flow.optimal_flow()) if status == flow.OPTIMAL else 0


@dataclass(frozen=True)
class Minimum:
    """A minimum cut of the flow network of one cut op, at a price λ for each byte that is resident just before the
    cut op's first execution.

    ``floor``: a lower bound, for all schedules, of the cost plus λ times these bytes, proven only if the network's
    ``slope`` is 0 (see `CutNetwork`). ``cost``, ``resident``: the cost (in the unit of `Op.cost`) and these bytes for
    the schedules that the minimum cut describes. The inputs and what the cut op reads are not counted.
    """

    floor: float
    cost: float
    resident: float
    again: tuple[int, ...]
    """The positions in ``graph.ops`` of the ops that run after the cut op although they can run before it. Those of
    them that must precede the cut op run both before and after it."""


def flow_bound(graph: TrainingGraph, order: Precedence, cut: int, budget: int) -> float:
    """Return the lower bound of the overhead that a cut at a single op proves: the bytes resident at the op's first
    execution must fit the budget. It is infinite if it is proven that no schedule is within the budget.

    Only for problems without inverses. The result is -1, which proves nothing, if sums in the flow network would
    overflow.
    """
    room = budget - graph.input_bytes - working_sets(graph)[cut]
    if room < 0:
        return math.inf
    network = CutNetwork(graph, order, cut)
    low, high = network.minimum(0.0), network.fewest_bytes()
    if low is None or high is None:
        return -1.0
    value = low.floor
    if low.resident > room and high.resident > room:
        return math.inf
    for _ in range(STEPS):
        if low.resident <= high.resident or low.resident <= room:
            break
        price = (high.cost - low.cost) / (low.resident - high.resident)
        middle = network.minimum(price)
        if middle is None:
            break
        value = max(value, middle.floor - price * room)
        if middle.resident >= low.resident or middle.resident <= high.resident:
            break
        low, high = (middle, high) if middle.resident > room else (low, middle)
    return value / graph.base_cost - 1


class CutNetwork:
    """The flow network of one cut op. Its minimum cut says which ops run after the cut op's first execution, and so
    which tensors are resident just before it.

    Node 0, the source, represents the ops that cannot run before the cut op. Node 1 is the sink. Every other op that
    must run has a node, on the source's side if it runs after the cut op. Each tensor that may be resident at the cut
    op has a node.

    ``slope``: the cost of each op is multiplied by a factor that rises linearly, from 1 for the first op of the problem
    to about 1 + ``slope`` for the last. Without a slope, equal blocks would all be recomputed from the same price on.
    With a slope, they are recomputed one after another as the price rises. It must be 0 for a proven bound.
    """

    def __init__(self, graph: TrainingGraph, order: Precedence, cut: int, slope: float = 0.0) -> None:
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
        """Create the arcs of the flow network, as arrays of their ends, costs and bytes.

        There is an arc from each op's node to the sink, with the cost of running the op after the cut op. There is
        one from each op to each tensor that it reads, with infinite capacity. There is one from each tensor to the op
        that writes it, with the tensor's bytes.
        """
        inputs = set(graph.inputs)
        holders: dict[str, int] = {}
        tails, heads, sizes = [], [], []
        for v, node in side.items():
            for t in graph.ops[v].reads:
                maker = side.get(graph.producer.get(t, -1), 0)
                if t in inputs or t in resident or maker == 0:
                    continue
                if t not in holders:
                    holders[t] = 2 + len(priced) + len(holders)
                    tails.append(holders[t])
                    heads.append(maker)
                    sizes.append(graph.size[t])
                tails.append(node)
                heads.append(holders[t])
                sizes.append(-1)
        count = len(priced)
        self.tails = np.array([*range(2, 2 + count), *tails], dtype=np.int32)
        self.heads = np.array([*[1] * count, *heads], dtype=np.int32)
        self.cost = np.array([*priced, *[0.0] * len(tails)])
        self.bytes = np.array([*[0] * count, *sizes], dtype=np.int64)

    def minimum(self, price: float) -> Minimum | None:
        """Return the minimum cut if each resident byte costs ``price``, in the unit of `Op.cost` per byte. None if
        the sum of the capacities would overflow."""
        capacity = (self.cost + price * np.maximum(self.bytes, 0)) * self.scale
        return self._cut(capacity, uncut=float(np.floor(self.cost * self.scale).sum()) + 1, scale=self.scale)

    def fewest_bytes(self) -> Minimum | None:
        """Return the minimum cut with the fewest resident bytes, whatever the cost of recomputation. Its ``floor`` is
        meaningless. None if the sum of the bytes would overflow."""
        capacity = np.maximum(self.bytes, 0).astype(np.float64)
        return self._cut(capacity, uncut=float(capacity.sum()) + 1, scale=1.0)

    def _cut(self, capacity: Floats, uncut: float, scale: float) -> Minimum | None:
        """Return the minimum cut, or None if sums of capacities would overflow."""
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
