"""The content of a file as plain data, before any analysis: the types that the loader's steps exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.graph import Node

Dim = int | str | None


@dataclass(frozen=True, slots=True)
class Declared:
    """A graph input or output as the file declares it. ``dtype``: numpy's name of the type. ``shape``: each
    dimension is a number, a symbol, or None if unknown; None if the number of dimensions is unknown."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor of a file. ``dtype``: numpy's name of the type. ``shape``: its sizes. ``load``: reads its data when
    called."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> Array:
        """Return a tensor with the data ``values``."""
        return cls(name, values.dtype.name, values.shape, lambda: values)


@dataclass(frozen=True, slots=True)
class Origin:
    """What the exporter recorded about an initialiser.

    ``kind``: torch.export's kind of input, such as ``PARAMETER``; empty if not recorded. ``folded_from``: the names
    of the tensors from which the exporter computed it.
    """

    kind: str = ""
    folded_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scope:
    """What the exporter recorded about a node. ``module``: the path of the module that ran it. ``operator``: the
    torch operator that it was made of."""

    module: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Body:
    """A subgraph of a node: a branch of an If, or the body of a Loop or Scan. It can also read values of the
    surrounding graph.

    ``inputs``, ``outputs``: names of values. ``initialisers``: its constant tensors by name. ``nodes``: in the
    file's order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initialisers: Mapping[str, Array]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Draft:
    """The content of a file's main graph as plain data, with functions inlined, before any analysis.

    ``inputs``, ``outputs``: as the file declares them. ``initialisers``: stored tensors by name. ``nodes``: in the
    file's order, at first. ``producer``: the exporter's name. ``origins``, ``scopes``: what the exporter recorded in
    the file's metadata, by initialiser and by node. ``bodies``: subgraphs by node and attribute; node names are
    unique across all of them. ``stated``: shapes of inner values, where the file states them.
    """

    name: str
    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]
    initialisers: Mapping[str, Array]
    nodes: tuple[Node, ...]
    producer: str = ""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    scopes: Mapping[str, Scope] = field(default_factory=dict)
    bodies: Mapping[str, Mapping[str, Body]] = field(default_factory=dict)
    stated: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)


@dataclass
class Edit:
    """The content of a file while it is changed in place.

    ``initialisers``: stored tensors by name. ``origins``, ``scopes``: what the exporter recorded, by initialiser and
    by node. ``nodes``: in order. ``used``: all names in use.
    """

    initialisers: dict[str, Array]
    origins: dict[str, Origin]
    nodes: list[Node]
    scopes: dict[str, Scope]
    used: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.used = {*self.initialisers, *(o for n in self.nodes for o in n.outputs)}
        self.used.update(i for n in self.nodes for i in n.inputs)

    def fresh(self, name: str) -> str:
        """Return ``name``, or ``name`` with a number appended if it is in use. The result then counts as in use."""
        k, free = 2, name
        while free in self.used:
            free, k = f"{name}_{k}", k + 1
        self.used.add(free)
        return free

    def float_weight(self, name: str) -> Array | None:
        """Return the initialiser named ``name`` if it has a floating-point type; None if there is none."""
        array = self.initialisers.get(name)
        return array if array is not None and array.dtype in roles.FLOATS else None
