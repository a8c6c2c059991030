"""The forward graph of an ONNX file: frozen, in topological order, with weights that are read on demand."""

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
    """A graph input or output.

    ``dtype``: numpy's name of the type. ``shape``: an input has numbers only; None if an output's shape is unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Weight:
    """An initialiser or folded constant.

    ``role``: ``parameter`` (trained), ``buffer`` (batch norm statistics, which the step updates) or ``constant``.
    ``load`` reads its array when called; external data stay on disk until then. ``generated``: the file contains no
    data for it (``ConstantOfShape``), so training starts from random values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)
    generated: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One ONNX node. ``version``: its domain's opset. An absent optional input or output is ``""``."""

    name: str
    op: str
    domain: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """The size to which a graph's batch is bound, if its constants may have been made for another size.

    ``places``: the inputs' axes that are the batch, by name. ``traced``: the size the file was made with: its own
    fixed size, or 1, which exporters use most. ``fixed``: whether the file states that size.
    """

    places: tuple[tuple[str, int], ...]
    size: int
    traced: int
    fixed: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward graph. ``nodes`` are in topological order; every name is written once."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    """What the loader changed or noticed that a user should know («looks like a folded inference export»)."""
    batch: Batch | None = None
    """The batch, if it is bound to another size than the constants may have been made for."""
