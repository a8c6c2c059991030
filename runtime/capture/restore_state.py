"""Contexts that restore what a trace may change: a module's attributes, buffers and gradients, and random states."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.generator_states import global_generators, states_restored
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.guards.attributes import is_record
from rematplan.runtime.guards.containers import CONTAINERS, content, items_in, refill, unchanged_content
from rematplan.runtime.guards.snapshots import PLAIN
from rematplan.runtime.symbols.expressions import SYMBOLIC, NotSymbolic

STANDARD_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
"""Exact types: what objects of subclasses keep is left as it is."""


@contextmanager
def same_attributes(module: nn.Module, name: str) -> Iterator[None]:
    """Restore the attributes of a module, its submodules and their records after the block, with the content of
    containers. Unless the block raised, warn, by the module's ``name``, of tensors and plain values that it left in
    public attributes."""
    before = [
        (path, m, dict(m.__dict__), {k: _tensors(v) for k, v in m.__dict__.items()}, _contents(m))
        for path, m in _holders(module)
    ]
    try:
        yield
    finally:
        left = []
        for path, m, attributes, tensors, contents in before:
            for key, value in m.__dict__.items():
                new = _tensors(value) - tensors.get(key, set())
                if not key.startswith("_") and (new or _is_other(value, attributes.get(key))):
                    left.append(f"{path}.{key}".lstrip("."))
            m.__dict__.clear()
            m.__dict__.update(attributes)
            for container, was in contents:
                refill(container, was)
    if left:
        warn(f"the forward of {name} sets {', '.join(left)}, which a planned one does not")


def check_no_sizes_kept(module: nn.Module) -> None:
    """Raise `NotSymbolic` if a trace has left a symbolic size in one of a module's attributes."""
    for path, holder in _holders(module):
        for key, value in holder.__dict__.items():
            if any(isinstance(leaf, SYMBOLIC) for leaf in pytree.tree_leaves(value)):
                raise NotSymbolic(f"its forward stores a size in {f'{path}.{key}'.lstrip('.')}")


class SameObjects:
    """The attributes of objects that a module is called with, and of objects in them, to be restored, and the content
    of containers and arrays. Modules, functions, classes and all beyond `_MOST` objects are left out."""

    def __init__(self, arguments: Iterable[Any]) -> None:
        """Copy the attributes and the content of ``arguments``, and of what is in them, up to `_MOST` objects."""
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any, Any]] = []
        """Of each container and array: the object or argument that has it, itself, and its content."""
        seen: set[int] = set()
        todo = [(one, one) for one in arguments]
        while todo and len(seen) < _MOST:
            one, owner = todo.pop()
            if id(one) in seen or isinstance(one, _NO_STATE):
                continue
            seen.add(id(one))
            todo += [(item, owner) for item in items_in(one) if type(item) not in PLAIN]
            if isinstance(one, (*CONTAINERS, np.ndarray)):
                self._contents.append((owner, one, content(one)))
            if type(getattr(one, "__dict__", None)) is dict:
                self._before.append((one, dict(vars(one))))
                todo += [(value, one) for value in vars(one).values()]

    def restore(self) -> list[Any]:
        """Restore the attributes and the content, and return the objects and arguments that had changed. New values of
        `functools.cached_property` do not count as changes."""
        changed = []
        for one, attributes in self._before:
            now = {k: v for k, v in vars(one).items() if k in attributes or not _is_cached(one, k)}
            if not _same(now, attributes):
                changed.append(one)
            vars(one).clear()
            vars(one).update(attributes)
        for owner, container, was in self._contents:
            is_array = isinstance(container, np.ndarray)
            if not (unchanged_content if is_array else _same)(container, was):
                changed.append(owner)
                refill(container, was)
        return changed


_MOST = 10_000
_NO_STATE = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def _is_cached(one: Any, name: str) -> bool:
    return isinstance(getattr(type(one), name, None), cached_property)


def _same(now: Any, before: Any) -> bool:
    """Return whether a container has the same keys and values, in order, as ``before``: the same objects, or plain ones
    that are equal. Sets are the same if they are equal."""
    if isinstance(now, dict):
        return now.keys() == before.keys() and _same([*now.values()], [before[key] for key in now])
    if isinstance(now, set):
        return bool(now == before)
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(
        a is b or (not _is_other(a, b) and type(a) in PLAIN) for a, b in pairs
    )


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the content of the module's buffers, in place, after the block."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, was in before:
                buffer.copy_(was)


@contextmanager
def same_gradients(module: nn.Module, copied: bool = False) -> Iterator[None]:
    """Restore all parameters' ``.grad`` and hooks after the block. In the block gradients begin as None or, if
    ``copied``, as copies."""
    before = [(p, p.grad, p._backward_hooks and dict(p._backward_hooks)) for p in module.parameters()]
    for parameter, gradient, _ in before:
        parameter.grad = gradient.clone() if copied and gradient is not None else None
    try:
        yield
    finally:
        for parameter, gradient, hooks in before:
            parameter.grad = gradient
            if hooks:
                refill(parameter._backward_hooks, hooks)
            elif parameter._backward_hooks:
                parameter._backward_hooks = None


def same_draws() -> AbstractContextManager[None]:
    """Restore, after the block, the global random states of PyTorch (CPU and CUDA), Python and NumPy."""
    return states_restored(global_generators())


def _holders(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the module, its submodules and the records (`is_record`) in their attributes, each once, with a path."""
    parts = list(module.named_modules())
    records = {
        id(value): (f"{path}.{key}", value)
        for path, part in parts
        for key, value in part.__dict__.items()
        if is_record(value)
    }
    return [*parts, *records.values()]


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    """Return pairs of a container and a shallow copy of it, for each list, dictionary, set or deque in an object's
    attributes, nested ones included, and for the object itself if it is a list or dictionary."""
    found = containers_below(holder.__dict__.values())
    if isinstance(holder, (dict, list)):
        found.append((holder, {**holder} if isinstance(holder, dict) else [*holder]))
    return found


def containers_below(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of a container and a shallow copy of it, for each of `STANDARD_CONTAINERS` in ``values``, nested
    ones included."""
    found: dict[int, tuple[Any, Any]] = {}
    todo = list(values)
    while todo:
        value = todo.pop()
        if type(value) in STANDARD_CONTAINERS and id(value) not in found:
            found[id(value)] = value, copy.copy(value)
            todo += value.values() if isinstance(value, dict) else value
        elif type(value) is tuple:
            todo += value
    return list(found.values())


def _is_other(value: Any, before: Any) -> bool:
    return type(value) in PLAIN and (type(before) is not type(value) or before != value)


def _tensors(value: Any) -> set[int]:
    return {id(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}
