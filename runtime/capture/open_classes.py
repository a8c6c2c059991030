"""Objects among a forward's arguments and results whose tensors are found: dataclasses, namespaces, and
distributions of PyTorch; and any other object among its arguments."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from rematplan.runtime.capture.hidden_tensors import hides_tensors
from rematplan.runtime.graph.compat import pytree

OPENED: set[type[Any]] = set()
"""The classes that `open_classes` has registered."""


def open_classes(tree: Any) -> None:
    """Register with PyTorch's pytrees the classes of distributions in a pytree, and of dataclasses and namespaces that
    have tensors, so that pytrees find the tensors. Distributions that a user wrote are not registered."""
    closed = dict.fromkeys(type(leaf) for leaf in pytree.tree_leaves(tree) if _opens(leaf))
    for kind in closed:
        pytree.register_pytree_node(kind, _opened, _closing(kind))
    OPENED.update(closed)
    if closed:
        open_classes(tree)  # what they are made of


def _opens(leaf: Any) -> bool:
    if isinstance(leaf, Distribution):
        return type(leaf).__module__.startswith("torch.distributions.")
    plain = is_dataclass(leaf) and not isinstance(leaf, (type, dict, list, tuple))
    return (plain or type(leaf) is SimpleNamespace) and hasattr(leaf, "__dict__") and hides_tensors(leaf)


def _opened(one: Any) -> tuple[list[Any], tuple[str, ...]]:
    return list(one.__dict__.values()), tuple(one.__dict__)


def _closing(kind: Any) -> Any:
    def closed(values: Any, names: tuple[str, ...]) -> Any:
        one = kind.__new__(kind)
        one.__dict__.update(zip(names, values, strict=True))
        return one

    return closed


def with_opened_objects(tree: Any) -> Any:
    """Return a pytree in which an object with tensors, of a class that pytrees do not open, is an `OpenedObject`."""
    return pytree.tree_map(_opened_object, tree, is_leaf=lambda one: isinstance(one, torch.Size))


@dataclass(frozen=True, slots=True)
class OpenedObject:
    """An object as its tensors and plain values, and the pickle of the rest. As a pytree it becomes a copy again."""

    values: Sequence[Any]
    rest: bytes


_CLOSED = (
    *(torch.Tensor, nn.Module, Distribution, torch.Generator, torch.Size, Iterator, type, ModuleType),
    *(FunctionType, BuiltinFunctionType, MethodType, type(None), bool, int, float, str, bytes),
)
"""Types of which no object is opened."""
_VALUES = (
    *(torch.Tensor, nn.Module, torch.Generator, torch.dtype, torch.device, type, ModuleType),
    *(FunctionType, BuiltinFunctionType, int, float, complex, str, bytes, torch.SymInt, torch.SymFloat),
)
"""Types whose objects are values of an opened object."""


class _Opening(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.values: list[Any] = []

    def persistent_id(self, one: Any) -> int | None:
        if not isinstance(one, _VALUES) or isinstance(one, bool):
            return None
        self.values.append(one)
        return len(self.values) - 1


class _Closing(pickle.Unpickler):
    persistent_load: Callable[[int], Any]


def _closed_object(values: Any, rest: bytes) -> Any:
    closing = _Closing(io.BytesIO(rest))
    closing.persistent_load = list(values).__getitem__
    return closing.load()


def _opened_object(leaf: Any) -> Any:
    """Return an object with tensors as an `OpenedObject`, if pickling copies all that objects of its class have; else
    the object itself."""
    if isinstance(leaf, _CLOSED) or _whole.get(type(leaf)) is False or not hides_tensors(leaf):
        return leaf
    with suppress(Exception):  # the object's methods may raise anything
        opening = _Opening(file := io.BytesIO())
        opening.dump(leaf)
        opened = OpenedObject(tuple(opening.values), file.getvalue())
        if type(leaf) not in _whole:
            copy = _closed_object(opened.values, opened.rest)
            kept = not isinstance(leaf, (dict, list, tuple)) or len(copy) == len(leaf)
            _whole[type(leaf)] = kept and type(copy) is type(leaf) and vars(copy).keys() == vars(leaf).keys()
        if _whole[type(leaf)]:
            return opened
    _whole[type(leaf)] = False
    return leaf


_whole: dict[type[Any], bool] = {}
"""By class, whether a pickle has all that its objects have."""
pytree.register_pytree_node(OpenedObject, lambda one: (list(one.values), one.rest), _closed_object)
