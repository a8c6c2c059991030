"""The forward graph as ONNX states it: frozen, in topological order, weights behind lazy readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

# Attribute values: numbers, strings, lists of them, or a constant tensor.
Attribute = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | np.ndarray

Role = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True, slots=True)
class Value:
    """A graph input or output. ``dtype`` is numpy's name; ``shape`` is fully bound for inputs, None where unknown."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Weight:
    """An initialiser or folded constant.

    ``role``: ``parameter`` (trained), ``buffer`` (batch norm statistics, updated by the step) or ``constant``.
    ``load`` reads its array when called; external data stays on disk until then.
    ``generated``: the file states no data for it (``ConstantOfShape``), so that training wants a random start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)
    generated: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One ONNX node. ``version`` is its domain's opset; an absent optional input or output is ``""``."""

    name: str
    op: str
    domain: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """The size that a graph's batch is bound to, where its constants may be made for another.

    ``places``: the inputs' axes that it is, by name. ``traced``: the size that the file was made with, as far as it
    says: its own fixed one, or one, which exporters take most. ``fixed``: whether the file says so.
    """

    places: tuple[tuple[str, int], ...]
    size: int
    traced: int
    fixed: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward graph. ``nodes`` stand in topological order; every name is written once."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    """What the loader did or noticed that a person should know («looks like a folded inference export»)."""
    batch: Batch | None = None
    """The batch, if it is bound to another size than constants may be made for."""
