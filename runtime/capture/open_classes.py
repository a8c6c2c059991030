"""Objects among a forward's arguments and results whose tensors are found: dataclasses, namespaces, and
distributions of PyTorch."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributions import Distribution

from rematplan.runtime.capture.hidden_tensors import hides_tensors
from rematplan.runtime.graph.compat import pytree

OPENED: set[type[Any]] = set()
"""The classes that `open_classes` has registered."""


def open_classes(tree: Any) -> None:
    """Register the classes of dataclasses, namespaces and distributions in a pytree that have tensors with PyTorch's
    pytrees, so that these find the tensors.

    Distributions that a user wrote are not registered.
    """
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
