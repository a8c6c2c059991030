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
    """A graph input or output as declared. A dimension is an int, a symbol or None; ``shape`` is None if the rank
    is unknown."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor whose data are read when ``load`` is called."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Origin:
    """What the exporter recorded about an initialiser: torch.export's kind of input, and what it was folded from."""

    kind: str = ""
    folded_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scope:
    """What the exporter recorded about a node: the path of the module that ran it, and the operator it stands for."""

    module: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Body:
    """A subgraph: a branch of an If, or the body of a Loop or Scan. It can also read values of the surrounding
    graph."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initialisers: Mapping[str, Array]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Draft:
    """The file's main graph, with functions inlined, before any analysis.

    ``origins`` by initialiser and ``scopes`` by node: what the exporter wrote into the file's metadata. ``bodies``:
    subgraphs by node and attribute; node names are unique across all of them. ``stated``: shapes of inner values,
    where the file states them.
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
    """A draft under modification."""

    initialisers: dict[str, Array]
    origins: dict[str, Origin]
    nodes: list[Node]
    scopes: dict[str, Scope]
    used: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.used = {*self.initialisers, *(o for n in self.nodes for o in n.outputs)}
        self.used.update(i for n in self.nodes for i in n.inputs)

    def fresh(self, name: str) -> str:
        """Return the name, or a similar one that is not in use."""
        k, free = 2, name
        while free in self.used:
            free, k = f"{name}_{k}", k + 1
        self.used.add(free)
        return free

    def float_weight(self, name: str) -> Array | None:
        """Return the initialiser of that name if it has a floating-point type; otherwise None."""
        array = self.initialisers.get(name)
        return array if array is not None and array.dtype in roles.FLOATS else None
