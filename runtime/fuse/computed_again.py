"""Which forward ops the backward's kernels compute again from their operands, at hardly any time, to keep fewer
bytes.

A minimum cut: kept storages cost their bytes, and what a kernel reads must follow from them, as in `torch.compile`'s
`min_cut_rematerialization_partition`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import networkx as nx

from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.pointwise_ops import is_pointwise


def is_cheap(call: Call) -> bool:
    """Return whether a kernel computes the call's only result without a loop of its own."""
    return call.single and is_pointwise(call.target)


def computed_again(
    step: CapturedStep, operands: Mapping[str, Iterable[str]], fused: Iterable[str], kept: Iterable[str]
) -> frozenset[str]:
    """Return the storages of forward results that the backward's kernels compute again. ``operands``: by the storage of
    a cheap op's result, the storages that the op reads. ``fused``: the storages that kernels of the backward read.
    ``kept``: those that exist anyway."""
    network, free = nx.DiGraph(), set(kept)
    seen, stack = set[str](), list(fused)
    # Arcs without a capacity are unlimited.
    network.add_edges_from(((storage, "out"), "sink") for storage in stack)
    while stack:
        storage = stack.pop()
        if storage in seen:
            continue
        seen.add(storage)
        size = 0 if storage in free else step.storage_bytes[storage]
        network.add_edge((storage, "in"), (storage, "out"), capacity=size)
        for read in operands.get(storage, ()):
            network.add_edge((read, "out"), (storage, "in"))
            stack.append(read)
        if storage not in operands:
            network.add_edge("source", (storage, "in"))
    if not seen:
        return frozenset()
    # Of all minimum cuts this is the one nearest to the sink, with which least is computed again.
    _, (_, late) = nx.minimum_cut(network, "source", "sink")
    return frozenset(storage for storage in seen if (storage, "in") in late)
