"""A memory policy for torchtitan's graph trainer: what the traced step saves for its backward within a budget, tested
with torchtitan 0.3."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.experiments.graph_trainer.common_utils import _is_backward_node
from torchtitan.experiments.graph_trainer.memory_policy import _make_full_memory_policy, tag_sac_policy
from torchtitan.experiments.graph_trainer.registry import register_memory_policy
from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

from rematplan.integrations.tested import warn_if_untested
from rematplan.integrations.torchtitan import TESTED_TORCHTITAN
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.plans.budgets import parse_budget
from rematplan.runtime.graph.compat import estimate_runtime, pytree

POSSIBLE = ("bytes", "share", "activations")
"""The kinds of budgets that a policy takes."""


def register_budget(budget: str | int, name: str = "rematplan") -> None:
    """Register a memory policy of torchtitan's graph trainer, to be chosen as ``compile.memory_policy``.

    The budget bounds the peak of the step's graph: parameters, inputs, and all results that exist at an op, if the ops
    run in the order that torchtitan's recomputation gives. Later passes, such as fusion and offloading, are not
    counted, and neither is the optimizer. The policy saves the results that take the longest to compute again for each
    of their bytes, by PyTorch's estimate. torchtitan's own rules hold: random results and those that cross layers are
    saved, and nothing of the loss is computed again.

    Args:
        budget: bytes such as ``"8GiB"``, or a share of the peak of a graph that saves all, such as ``"60%"`` or
            ``"50% of activations"``.
        name: the name of the policy.

    Raises:
        UsageError: the budget is malformed. When the step is compiled, `InfeasibleBudget`: it is below the peak of
            recomputing all.
    """
    warn_if_untested("torchtitan", TESTED_TORCHTITAN)
    asked = parse_budget(str(budget), POSSIBLE)

    def policy(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        """Tag the ops of ``gm`` whose results are saved within the budget, print the predicted peak to standard error,
        and return ``gm``."""
        del config
        inputs, all_saved = peak_bytes(gm.graph)
        most = asked.bytes(all_saved, lambda: 0, inputs)
        names = _saved_within(gm, most)
        print(
            f"rematplan: the step's graph has a peak of {show_bytes(_peak_saving(gm, names))} within "
            f"{show_bytes(most)}; not counted: the optimizer, and what later passes change",
            file=sys.stderr,
        )
        return _tag(gm, names)

    register_memory_policy(name)(policy)


def _saved_within(gm: fx.GraphModule, budget: int) -> list[str]:
    """Return the names of the nodes that a graph saves: in the order of their value, as many as fit. `InfeasibleBudget`
    if the graph exceeds the budget even without saved nodes."""
    nodes = sorted(filter(_may_be_saved, gm.graph.nodes), key=_value, reverse=True)
    names = [node.name for node in nodes]
    smallest = _peak_saving(gm, names[:0])
    if smallest > budget:
        raise InfeasibleBudget("torchtitan's recomputation", budget, smallest)
    fits, exceeds = 0, len(names) + 1
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if _peak_saving(gm, names[:middle]) <= budget:
            fits = middle
        else:
            exceeds = middle
    return names[:fits]


def _peak_saving(gm: fx.GraphModule, names: Sequence[str]) -> int:
    """Return the peak of a graph that saves these nodes. The graph stays as it is."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return peak_bytes(selective_activation_remat_pass(_tag(fx.GraphModule(gm, graph), names)).graph)[1]


def _tag(gm: fx.GraphModule, saved: Sequence[str]) -> fx.GraphModule:
    full, names = _make_full_memory_policy(), set(saved)

    def policy(node: fx.Node) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if node.name in names else full(node)

    tagged: fx.GraphModule = tag_sac_policy(gm, policy_fn=policy)
    return tagged


def _may_be_saved(node: fx.Node) -> bool:
    return node.op == "call_function" and not _is_backward_node(node) and _has_own_memory(node)


def _value(node: fx.Node) -> float:
    """Return the time to compute a node again, by PyTorch's estimate, for each byte of its results."""
    return float(estimate_runtime(node)) / max(1, sum(_sizes(node)))


def _sizes(node: fx.Node) -> list[int]:
    """Return the bytes of each result of a node."""
    results = pytree.tree_leaves(node.meta.get("val"))
    return [one.untyped_storage().nbytes() for one in results if isinstance(one, torch.Tensor)]


def _has_own_memory(node: fx.Node) -> bool:
    """Return whether the results of a node are in none of its arguments' memory."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(one.alias_info is not None for one in schema.returns)
    return node.target is not operator.getitem and not is_view


def peak_bytes(graph: fx.Graph) -> tuple[int, int]:
    """Return the bytes of a graph's inputs, and the peak if its ops run in order and each result is freed after its
    last use."""
    blocks: dict[fx.Node, list[int]] = {}  # the results, by number, whose memory a node's value is
    sizes: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    inputs = 0
    for at, node in enumerate(graph.nodes):
        for block in (block for one in node.all_input_nodes for block in blocks[one]):
            ends[block] = at
        if node.op == "placeholder":
            inputs += sum(_sizes(node))
            blocks[node] = []
        elif node.op == "call_function" and _has_own_memory(node):
            own = _sizes(node)
            blocks[node] = list(range(len(sizes), len(sizes) + len(own)))
            sizes += own
            begins += [at] * len(own)
            ends += [at] * len(own)
        else:
            blocks[node] = _within(node, blocks)
    changes = Counter[int]()
    for size, begin, end in zip(sizes, begins, ends, strict=True):
        changes[begin] += size
        changes[end + 1] -= size
    return inputs, inputs + max(accumulate(changes[at] for at in range(len(graph.nodes))))


def _within(node: fx.Node, blocks: Mapping[fx.Node, list[int]]) -> list[int]:
    """Return the results in whose memory the value of a view, an item or the graph's output is."""
    parts = [blocks[one] for one in node.all_input_nodes]
    if node.target is operator.getitem and isinstance(node.args[1], int) and len(parts[0]) > node.args[1]:
        return [parts[0][node.args[1]]] if _has_own_memory(node.all_input_nodes[0]) else parts[0]
    return [block for part in parts for block in part]
