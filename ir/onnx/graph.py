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
    """An input or output of a graph.

    ``dtype``: numpy's name of the type. ``shape``: sizes; always known for an input, None if unknown for an output.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Weight:
    """An initialiser of a file, or a constant that was computed when the file was loaded.

    ``dtype``: numpy's name of the type. ``shape``: its sizes. ``role``: ``parameter`` (trained), ``buffer`` (batch
    norm statistics, which the step updates) or ``constant``. ``load``: reads its array when called; external data
    stay on disk until then. ``generated``: whether the file has no data for it (``ConstantOfShape``), so that
    training starts from random values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)
    generated: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One ONNX node: its unique ``name``, its type ``op`` and its ``attributes`` by name.

    ``domain``: empty for ONNX's own ops. ``version``: the opset of its domain. ``inputs``, ``outputs``: names of
    values; "" for an optional one that is absent.
    """

    name: str
    op: str
    domain: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """The size to which a graph's batch dimension is bound, if the file's constants may have been made for another
    size.

    ``places``: the batch dimensions as pairs (input, axis). ``size``: the size that is bound. ``traced``: the size
    that the file was made with: the fixed size in the file, or 1, which exporters use most. ``fixed``: whether the
    file states that size.
    """

    places: tuple[tuple[str, int], ...]
    size: int
    traced: int
    fixed: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """The forward graph of an ONNX file.

    ``name``: of the graph in the file. ``inputs``, ``outputs``: what the forward takes and returns. ``weights``: the
    values that nodes read and that are neither inputs nor written by a node. ``nodes``: in topological order; every
    value is written once.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    """What the loader changed or noticed that a user should know («looks like a folded inference export»)."""
    batch: Batch | None = None
    """The batch, if it is bound to another size than the file's constants may have been made for; else None."""
