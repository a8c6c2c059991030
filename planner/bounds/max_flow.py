"""A quick lower bound of the overhead: one cut, with a price for memory. The proof is in docs/lower-bound.md.

Take the program of `multi_cut_program` with one cut b, and a price λ ≥ 0 for a byte held just before b's first run:

    L(λ) = Σ c_v − λ·room + min over y of Σ c_v y_v + λ Σ m_t h_t,   h_t = 1 if a reader of t has y = 1, its maker not

y_v: v runs after the cut too. It is 1 for ops that cannot run before the cut, and free for ops that need not have
run before it. For each λ the minimum is a minimum cut, found by a maximum flow in milliseconds for ten thousand
ops. L is concave and piecewise linear, and its maximum equals the program's linear relaxation.
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
NEVER = 2.0
"""The cost of running again an op that may run only once, as a multiple of the cost of running each op once. No
schedule has it."""
LARGEST = 2.0**62
"""The largest sum of capacities, so that sums fit into 64 bits."""
STEPS = 40
"""The largest number of prices tried at a cut; about a dozen suffice."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Minimum:
    """A minimum cut at one price λ of a byte that is resident just before the cut op's first run.

    ``floor``: a proven lower bound of cost + λ · resident bytes, for any schedule. ``cost``, ``resident``: the cost
    and the resident bytes of the schedules that the minimum cut describes.
    """

    floor: float
    cost: float
    resident: float
    again: tuple[int, ...]
    """The positions in ``graph.ops`` of the ops that run before the cut op and again after it."""


def flow_bound(graph: TrainingGraph, order: Precedence, cut: int, budget: int) -> float:
    """Return the lower bound of the overhead that a single cut proves; infinite if it is proven that no schedule
    fits.

    Only for problems without inverses. -1, which proves nothing, if the numbers are too large for the arithmetic.

    Args:
        graph: the problem.
        order: which op must precede which.
        cut: the position in ``graph.ops`` of an op that every schedule runs.
        budget: bytes.
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
    """The flow network of one cut op: its minimum cuts say which ops run again after the cut op.

    Node 0 is the source (runs after the cut op), node 1 the sink (does not). Each op that may run on both sides has
    a node, and each tensor that may be resident at the cut.

    ``slope``: costs rise by this share from the first op to the last. Equal blocks then differ, and the minimum
    moves through them one by one as the price rises. For a bound it must be 0.
    """

    def __init__(self, graph: TrainingGraph, order: Precedence, cut: int, slope: float = 0.0) -> None:
        self.scale = SCALE / graph.base_cost
        needed = [v for v in range(len(graph.ops)) if order.needed >> v & 1]
        self.constant = math.fsum(graph.ops[v].cost for v in needed)
        earlier, once = order.before[cut], set(graph.never_rerun)
        side: dict[int, int] = {}  # op -> its node
        priced: list[
            float
        ] = []  # of the ops with a node: what y = 1 costs; another run if it has run by the cut
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
        """Create the arcs: op to sink (its cost), reader to tensor, tensor to maker (its bytes)."""
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
        """Return the minimum cut if each resident byte costs ``price``, in the unit of `Op.cost`; None if the sum of
        the capacities would be too large."""
        capacity = (self.cost + price * np.maximum(self.bytes, 0)) * self.scale
        return self._cut(capacity, uncut=float(np.floor(self.cost * self.scale).sum()) + 1, scale=self.scale)

    def fewest_bytes(self) -> Minimum | None:
        """Return the cut with the fewest resident bytes at any cost; its ``floor`` is meaningless. None if the bytes
        are too many to be summed."""
        capacity = np.maximum(self.bytes, 0).astype(np.float64)
        return self._cut(capacity, uncut=float(capacity.sum()) + 1, scale=1.0)

    def _cut(self, capacity: Floats, uncut: float, scale: float) -> Minimum | None:
        """Return the minimum cut. ``uncut``: a capacity larger than all others together, which stands for infinity."""
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
