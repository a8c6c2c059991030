"""Which forward ops the backward's kernels compute again from their operands, at hardly any time, to keep fewer
bytes.

A minimum cut: kept storages cost their bytes, and what a kernel reads must follow from them, as in `torch.compile`'s
`min_cut_rematerialization_partition`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.pointwise_ops import is_pointwise

INFINITE = 1 << 62


def is_cheap(call: Call) -> bool:
    """Return whether a kernel computes the call's only result without a loop of its own."""
    return call.single and is_pointwise(call.target)


def computed_again(
    step: CapturedStep, operands: Mapping[str, Iterable[str]], fused: Iterable[str], kept: Iterable[str]
) -> frozenset[str]:
    """Return the storages of forward results that the backward's kernels compute again. ``operands``: by the storage of
    a cheap op's result, the storages that the op reads. ``fused``: the storages that kernels of the backward read.
    ``kept``: those that exist anyway."""
    network, free = Network(), set(kept)
    seen, stack = set[str](), list(fused)
    for storage in stack:
        network.add((storage, "out"), "sink", INFINITE)
    while stack:
        storage = stack.pop()
        if storage in seen:
            continue
        seen.add(storage)
        size = 0 if storage in free else step.storage_bytes[storage]
        network.add((storage, "in"), (storage, "out"), size)
        for read in operands.get(storage, ()):
            network.add((read, "out"), (storage, "in"), INFINITE)
            stack.append(read)
        if storage not in operands:
            network.add("source", (storage, "in"), INFINITE)
    # Of all minimum cuts the one nearest to the sink, with which least is computed again.
    late = network.after_least_cut("source", "sink")
    return frozenset(storage for storage in seen if (storage, "in") in late)


class Network:
    """A flow network. Dinic's algorithm finds a maximum flow, and with it a minimum cut."""

    def __init__(self) -> None:
        self.arcs: dict[object, list[int]] = {}
        self.head: list[object] = []
        self.capacity: list[int] = []
        """Of each arc, what is left; arc k and arc k ^ 1 are opposite to each other."""

    def add(self, tail: object, head: object, capacity: int) -> None:
        """Add an arc."""
        for a, b, left in ((tail, head, capacity), (head, tail, 0)):
            self.arcs.setdefault(a, []).append(len(self.head))
            self.head.append(b)
            self.capacity.append(left)

    def after_least_cut(self, source: object, sink: object) -> set[object]:
        """Return the nodes from which flow could still reach ``sink`` after a maximum flow."""
        while True:
            distance = self._distances(source)
            if sink not in distance:
                return self._reaching(sink)
            following = dict.fromkeys(self.arcs, 0)
            while self._augment(source, sink, distance, following):
                pass

    def _distances(self, source: object) -> dict[object, int]:
        found, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for arc in self.arcs.get(node, ()):
                if self.capacity[arc] and self.head[arc] not in found:
                    found[self.head[arc]] = found[node] + 1
                    queue.append(self.head[arc])
        return found

    def _augment(
        self, source: object, sink: object, distance: Mapping[object, int], following: dict[object, int]
    ) -> bool:
        """Send flow along one path on which the distance grows by one an arc, and return whether there was one.
        ``distance``: of nodes from ``source``. ``following``: by node, its first arc that is not exhausted, updated
        here."""
        path: list[int] = []
        node = source
        while node != sink:
            arcs = self.arcs[node]
            while following[node] < len(arcs):
                arc = arcs[following[node]]
                if self.capacity[arc] and distance.get(self.head[arc], -1) == distance[node] + 1:
                    break
                following[node] += 1
            else:
                if not path:
                    return False
                node = self.head[path.pop() ^ 1]
                following[node] += 1
                continue
            path.append(arc)
            node = self.head[arc]
        flow = min(self.capacity[arc] for arc in path)
        for arc in path:
            self.capacity[arc] -= flow
            self.capacity[arc ^ 1] += flow
        return True

    def _reaching(self, sink: object) -> set[object]:
        found, stack = {sink}, [sink]
        while stack:
            for arc in self.arcs.get(stack.pop(), ()):
                if self.capacity[arc ^ 1] and self.head[arc] not in found:
                    found.add(self.head[arc])
                    stack.append(self.head[arc])
        return found
