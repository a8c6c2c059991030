"""A module's own attributes as they were before its forward was traced: what a trace leaves there is no real tensor."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rematplan.runtime.constants import PLAIN
from rematplan.runtime.reads import is_record

CONTAINERS = (list, dict, set, OrderedDict)


@contextmanager
def untouched(module: nn.Module, name: str) -> Iterator[None]:
    """A block after which attributes of the module, its parts and records that they hold are as before it, as is what
    lists, dictionaries and sets among them hold, hooks among these. Warns of tensors and plain values that the block
    left in public ones, as a planned forward will not. ``name``: the module's."""
    before = [(path, m, dict(m.__dict__), _contents(m)) for path, m in _holders(module)]
    try:
        yield
    finally:
        left = []
        for path, m, attributes, contents in before:
            found = {id(container): was for container, was in contents}
            for key, value in m.__dict__.items():
                if not key.startswith("_") and _is_new(value, found.get(id(value), attributes.get(key))):
                    left.append(f"{path}.{key}".lstrip("."))
            m.__dict__.clear()
            m.__dict__.update(attributes)
            for container, was in contents:
                _refill(container, was)
    if left:
        warnings.warn(
            f"the forward of {name} sets {', '.join(left)}, which a planned one does not",
            stacklevel=2,
        )


def _holders(module: nn.Module) -> list[tuple[str, Any]]:
    """A module, its parts, and the records in their attributes, each once, by the way to them."""
    parts = list(module.named_modules())
    records = {
        id(value): (f"{path}.{key}", value)
        for path, part in parts
        for key, value in part.__dict__.items()
        if is_record(value)
    }
    return [*parts, *records.values()]


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    return [(v, copy.copy(v)) for v in holder.__dict__.values() if type(v) in CONTAINERS]


def _refill(container: Any, was: Any) -> None:
    if isinstance(container, list):
        container[:] = was
    else:
        container.clear()
        container.update(was)


def _is_new(value: Any, before: Any) -> bool:
    return bool(_tensors(value) - _tensors(before)) or (
        type(value) in PLAIN and (type(before) is not type(value) or before != value)
    )


def _tensors(value: Any) -> set[int]:
    return {id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
