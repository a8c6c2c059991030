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
    """An input or output of a graph."""

    name: str
    dtype: str
    """numpy's name of the element type."""
    shape: tuple[int, ...] | None
    """None for an output whose sizes are not known."""


@dataclass(frozen=True, slots=True)
class Weight:
    """An initialiser of an ONNX file, or a constant computed when the file was loaded."""

    name: str
    dtype: str
    """numpy's name of the element type."""
    shape: tuple[int, ...]
    role: Role
    """``parameter``: trained. ``buffer``: batch norm's statistics and step counter. Else ``constant``."""
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)
    """Returns the data; external data are read from disk only then."""
    generated: bool = False
    """Whether a node of the file fills it with one value. Then its training starts from random values."""


@dataclass(frozen=True, slots=True)
class Node:
    """One ONNX node."""

    name: str
    """Unique."""
    op: str
    """The name of the ONNX operator."""
    domain: str
    """Empty for ONNX's own ops."""
    version: int
    """The opset of its domain."""
    inputs: tuple[str, ...]
    """Names of the values that it reads; "" for an absent optional one."""
    outputs: tuple[str, ...]
    """Names of the values that it writes; "" for an absent optional one."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch size that the user chose for an ONNX file whose constants may have been computed for another."""

    places: tuple[tuple[str, int], ...]
    """The batch dimensions, as pairs (input name, axis)."""
    size: int
    """The batch size that the user chose."""
    traced: int
    """The batch size of the export: the file's fixed size, else 1, with which most exports are made."""
    fixed: bool
    """Whether the file has a fixed size."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The forward graph of an ONNX file."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    """All values that nodes read and that are neither inputs nor written by a node."""
    nodes: tuple[Node, ...]
    """The nodes in topological order; each value is written once."""
    notes: tuple[str, ...] = ()
    """What the loader changed or noticed that a user should know («looks like a folded inference export»)."""
    batch: Batch | None = None
    """The batch dimension and its size, if the user chose another size than that of the export; else None."""
