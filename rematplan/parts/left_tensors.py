"""Find the tensors that a forward leaves elsewhere than in its results, such as features in a hook's dictionary."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from typing import Any

import torch

from rematplan.runtime.graph.compat import FakeTensor, FunctionalTensor


def left_tensors(nodes: Collection[Any], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, except ``results``, that Python code still holds and whose autograd graph has one of
    ``nodes``."""
    known = {id(one) for one in results}
    without: set[Any] = set()
    objects = gc.get_objects()
    # Of millions of objects, a few thousand types: what costs time for an object is done for its type.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    kinds -= {FakeTensor, FunctionalTensor}  # garbage of a capture that failed
    found = [
        one
        for one in objects
        if type(one) in kinds
        and id(one) not in known
        and one.grad_fn is not None
        and _reaches(one.grad_fn, nodes, without)
    ]
    del objects  # it would count as a holder
    # Python objects of tensors that only an autograd graph has saved exist too, but nothing in Python refers to them.
    holders = [one for one in gc.get_referrers(*found) if one is not found] if found else []
    held = {id(one) for one in gc.get_referents(*holders)} if holders else set()
    return [one for one in found if id(one) in held]


def _reaches(start: Any, nodes: Collection[Any], without: set[Any]) -> bool:
    """Return whether a node's graph has one of ``nodes``. ``without``: nodes whose graphs are known to have none."""
    todo, seen = [start], {start}
    while todo:
        node = todo.pop()
        if node in nodes:
            return True
        new = {inner for inner, _ in node.next_functions if inner is not None} - seen - without
        seen |= new
        todo += new
    without |= seen
    return False
