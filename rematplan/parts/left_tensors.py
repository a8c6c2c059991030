"""Find the tensors that a forward leaves elsewhere than in its results, such as features in a hook's dictionary."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from rematplan.runtime.graph.compat import FakeTensor, FunctionalTensor, pytree
from rematplan.runtime.guards.python_state import TENSORS


def left_tensors(nodes: Collection[Any], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, except ``results``, that Python still holds and whose autograd graph has one of ``nodes``."""
    known = {id(one) for one in results}
    without: set[Any] = set()
    found = [
        one
        for one in _tensors_with_graphs()
        if id(one) not in known and _reaches(one.grad_fn, nodes, without)
    ]
    # Python objects of tensors that only an autograd graph has saved exist too, but nothing in Python refers to them.
    holders = [one for one in gc.get_referrers(*found) if one is not found] if found else []
    held = {id(one) for one in gc.get_referents(*holders)} if holders else set()
    return [one for one in found if id(one) in held]


def nodes_of_tensors() -> set[Any]:
    """Return the autograd nodes that made the tensors that exist in Python. What is computed later continues the
    earlier graphs at these nodes."""
    return {one.grad_fn for one in _tensors_with_graphs()}


def reach(tensors: Iterable[torch.Tensor], nodes: Collection[Any]) -> bool:
    """Return whether the autograd graph of one of the tensors has one of ``nodes``."""
    without: set[Any] = set()
    return any(one.grad_fn is not None and _reaches(one.grad_fn, nodes, without) for one in tensors)


def _tensors_with_graphs() -> list[torch.Tensor]:
    """Return the tensors that exist in Python and that an autograd node made."""
    objects = gc.get_objects()
    # Of millions of objects, a few thousand types: what costs time for an object is done for its type.
    kinds = {
        kind
        for kind in set(map(type, objects))
        if issubclass(kind, torch.Tensor)
        and not issubclass(kind, (FakeTensor, FunctionalTensor))  # garbage of a capture that failed
    }
    return [one for one in objects if type(one) in kinds and one.grad_fn is not None]


def _reaches(start: Any, nodes: Collection[Any], without: set[Any]) -> bool:
    """Return whether a node's autograd graph has one of ``nodes``. ``without``: nodes whose graphs are known to have
    none; all nodes of this graph are added if it has none."""
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


def not_part_of(losses: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results that are no losses and of which no loss is made."""
    todo = [*dict.fromkeys(one.grad_fn for one in losses)]
    seen, read = set(todo), {(one.grad_fn, one.output_nr) for one in losses}
    while todo:
        node = todo.pop()
        edges = node.next_functions if node is not None else ()
        read.update(edges)
        new = {inner for inner, _ in edges} - seen
        seen |= new
        todo += new
    return [one for one in results if (one.grad_fn, one.output_nr) not in read]


class AttributeTensors:
    """The tensors in the attributes of a model's modules before a forward, except parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: attribute_tensors(model, [name]) for name, _ in model.named_modules()}

    def of(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Return the tensors that attributes of the modules with these names had before the forward."""
        return [one for name in names for one in self._before[name]]

    def in_rest(self, parts: Iterable[str]) -> list[str]:
        """Return the names of the modules outside of ``parts``."""
        inner = tuple(f"{name}." for name in parts)
        return [name for name in self._before if not f"{name}.".startswith(inner)]

    def changed(self, parts: Iterable[str]) -> tuple[str, ...]:
        """Return the names of modules outside of ``parts`` whose attributes have other tensors now."""
        known = {name for name, _ in self._model.named_modules()}
        now = {name: attribute_tensors(self._model, [name]) for name in self.in_rest(parts) if name in known}
        return tuple(
            name
            for name, every in now.items()
            if len(every) != len(self._before[name]) or not all(map(is_, every, self._before[name]))
        )


def attribute_tensors(model: nn.Module, names: Iterable[str]) -> list[torch.Tensor]:
    """Return the tensors in the attributes of the modules with these names, except parameters and buffers."""
    held = ([v for k, v in vars(model.get_submodule(name)).items() if k not in TENSORS] for name in names)
    return [one for one in pytree.tree_leaves([*held]) if isinstance(one, torch.Tensor)]
