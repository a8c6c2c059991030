"""The planner of what `torch.compile` saves under its own ``activation_memory_budget``: PyTorch's extension point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from rematplan.planner.knapsack import pack
from rematplan.runtime.graph.compat import (
    CustomKnapsackSolver,
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    estimate_runtime,
    excluded_dispatch_keys,
    included_dispatch_keys,
    node_bytes,
)

UNITS = 1 << 40
"""Sizes that are no multiples of a byte are rounded to the largest one divided by this number."""
SAME_RATIO = 1e-9
"""If all sizes divided by the bytes of their nodes differ by less than this share, the sizes are bytes."""


class KnapsackSolver(CustomKnapsackSolver):
    """A solver for ``torch._functorch.config.activation_memory_budget_solver``, in place of ``"dp"``.

    It chooses which results of the forward `torch.compile` saves for its backward: those that take the most time to
    compute again, according to PyTorch's own estimate (``activation_memory_budget_runtime_estimator``), within the
    budget. PyTorch's solvers round sizes to multiples of 1/10000, so what they save may exceed the budget. This one
    computes with bytes, and what it saves never does. It is exact, except for hard cases (hundreds of sizes that are
    nearly proportional to times), and gives equal results for equal graphs.

    In contrast to `backend`, it decides neither the order of ops nor the peak: Inductor does, as always.
    """

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Return the positions of the nodes to save, and of those that may be computed again.

        ``memory``: the size of each node's result, in any unit. ``max_memory``: the capacity, in the same unit.
        """
        del joint_graph, node_info
        nodes = all_recomputable_banned_nodes
        saved = saved_nodes(memory, [node_bytes(n) for n in nodes], _times(nodes), max_memory)
        return saved, [at for at in range(len(memory)) if at not in set(saved)]

    def uuid(self) -> Any | None:
        """Return what `torch.compile` adds to the key of its cache."""
        return "rematplan.KnapsackSolver, version 1"


def saved_nodes(
    memory: Sequence[float], sizes: Sequence[int], times: Sequence[float], most: float
) -> list[int]:
    """Return the positions of the nodes to save. Their ``memory`` sums to at most ``most``, and their ``times`` to
    nearly as much as possible: weights may be rounded, and `pack` may leave a gap.

    ``sizes``: the nodes' bytes. If ``memory`` is proportional to these, they are the weights, without rounding.
    """
    weights, capacity = _weights(memory, sizes, most)
    while True:
        found = list(pack(weights, times, capacity).items)
        taken = [memory[at] for at in found]
        if max(sum(taken), math.fsum(taken)) <= most:
            return found
        # The rounding of weights hid that they exceed the capacity.
        capacity = sum(weights[at] for at in found) - 1


def _weights(memory: Sequence[float], sizes: Sequence[int], most: float) -> tuple[list[int], int]:
    """Return weights and a capacity as integers: bytes if ``memory`` is proportional to ``sizes``, else multiples of
    the largest ÷ `UNITS`. What is larger than 0 is at least 1."""
    largest = max(range(len(memory)), key=memory.__getitem__, default=0)
    if memory and sizes[largest]:
        unit = memory[largest] / sizes[largest]
        if all(abs(m - unit * size) <= SAME_RATIO * m for m, size in zip(memory, sizes, strict=True)):
            return list(sizes), _floor(most, unit)
    unit = max(memory, default=0.0) / UNITS or 1.0
    return [max(round(m / unit), int(m > 0)) for m in memory], _floor(most, unit)


def _floor(most: float, unit: float) -> int:
    # Larger by some roundings: whether the chosen nodes fit is checked afterwards.
    return math.floor(most / unit * (1 + 1e-12))


def _times(nodes: Sequence[fx.Node]) -> list[float]:
    """Return PyTorch's estimates of the time of each node."""
    # The partitioner calls its solver while dispatch to Python is disabled, but counting FLOPs needs it.
    python = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)
    with ForceDispatchKeyGuard(included_dispatch_keys(), excluded_dispatch_keys() - python):
        return [float(estimate_runtime(node)) for node in nodes]
