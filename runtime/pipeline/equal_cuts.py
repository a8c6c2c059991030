"""Cuts of an exported graph into stages of about equal work, used if no better cuts are requested."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import fx
from torch.utils import flop_counter

from rematplan.ir import UsageError
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.pipeline.stage_modules import cut_names, cut_places

BALANCE = 10.0
"""Operations per byte. An op's work is its bytes, or its operations divided by this number if that is
more."""


def equal_cuts(graph: fx.Graph, stages: int, narrow: bool = False) -> tuple[str, ...]:
    """Return the names of modules to cut at, so that the largest work of a stage is minimal. Among equal
    choices, fewest bytes cross the cuts.

    Dynamic programming over the number of stages: least[s][j] = min over i of max(least[s−1][i], work from i
    to j). O(stages · names²).

    ``narrow``: whether to cut only where no more bytes cross than at the neighbouring places, if there are enough.

    Raises:
        UsageError: the model has too few places to cut at.
    """
    places = cut_places(graph)
    # Of modules that begin at the same op, the outermost.
    names = {places[name]: name for name in reversed(cut_names(graph))}
    ops = [node for node in graph.nodes if node.op == "call_function"]
    if len(names) < stages - 1:
        raise UsageError(f"the model has {len(names) + 1} places for stages, not {stages}")
    work = [0.0, *accumulate(map(_work, ops))]
    ends = [0, *sorted(names), len(ops)]
    crossing = [_crossing(ops, end) for end in ends]
    inner = range(1, len(ends) - 1)
    few = [j for j in inner if crossing[j] <= min(crossing[k] for k in (j - 1, j, j + 1) if k in inner)]
    allowed = {*(few if narrow and len(few) >= stages - 1 else inner), len(ends) - 1}
    least: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for _ in range(stages):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for j in sorted(allowed):
            row[j] = min(
                (
                    (max(most, work[ends[j]] - work[ends[i]]), sent + crossing[j], (*cuts, j))
                    for i, (most, sent, cuts) in least[-1].items()
                    if i < j
                ),
                default=(math.inf, math.inf, ()),
            )
        least.append(row)
    chosen = least[-1][len(ends) - 1][2][:-1]
    return tuple(names[ends[j]] for j in chosen)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def _work(node: fx.Node) -> float:
    """Return the bytes of a node, or its operations divided by `BALANCE` if that is more."""
    moved = sum(t.nbytes for n in (node, *node.all_input_nodes) for t in _tensors(n))
    with flop_counter.FlopCounterMode(display=False) as counter:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        node.target(*args, **kwargs)  # type: ignore[operator]
    return max(float(moved), float(counter.get_total_flops()) / BALANCE)


def _crossing(ops: list[fx.Node], place: int) -> float:
    late = set(ops[place:])
    return float(sum(t.nbytes for n in ops[:place] if not late.isdisjoint(n.users) for t in _tensors(n)))
