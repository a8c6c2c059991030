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

    ``dtype``: numpy's name of the element type. ``shape``: the sizes. They are known for every input; for an output
    whose sizes are not known, ``shape`` is None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Weight:
    """An initialiser of an ONNX file, or a constant that was computed when the file was loaded.

    ``dtype``: numpy's name of the element type. ``shape``: its sizes. ``role``: ``parameter`` (trained), ``buffer``
    (batch norm's statistics and step counter) or ``constant``. ``load``: returns the data; external data are read from
    disk only then. ``generated``: whether the file has no data for it, because a node (``ConstantOfShape``)
    fills it with one value. Its training then starts from random values.
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
    """The batch size that the user chose for an ONNX file, where the file may have been exported with another.

    Constants in the file, such as shapes, may then have been computed for the other size. ``places``: the batch
    dimensions of the inputs, as pairs (input name, axis). ``size``: the size that the user chose. ``traced``: the size
    that the file was exported with. If the file has a fixed size, it is this one; else 1 is assumed, which most exports
    use. ``fixed``: whether the file has the fixed size ``traced``.
    """

    places: tuple[tuple[str, int], ...]
    size: int
    traced: int
    fixed: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """The forward graph of an ONNX file.

    ``name``: the graph's name in the file. ``inputs``, ``outputs``: what the forward takes and returns.
    ``weights``: all values that nodes read and that are neither inputs nor written by a node. ``nodes``: in topological
    order; every value is written once.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    """What the loader changed or noticed that a user should know («looks like a folded inference export»)."""
    batch: Batch | None = None
    """The batch dimension and its size, if the user chose another size than that of the export; else None."""
