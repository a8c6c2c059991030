"""The content of an ONNX file as plain data, before any analysis: the types that the loader's steps exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.graph import Node

Dim = int | str | None


@dataclass(frozen=True, slots=True)
class Declared:
    """A graph input or output as the ONNX file declares it.

    ``dtype``: numpy's name of the element type, "" for an output without type. ``shape``: None if the number of
    dimensions is unknown; else each dimension is a number, a symbol's name, or None if unknown.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor stored in an ONNX file, whose data are read only when ``load`` is called.

    ``dtype``: numpy's name of the element type. ``shape``: its sizes. ``load``: returns the data.
    """

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
    """What torch's exporter recorded about an initialiser (a tensor that is stored in the ONNX file), or about a tensor
    of the exported module that it folded into initialisers.

    ``kind``: torch.export's kind of input, such as ``PARAMETER``; empty if not recorded. ``folded_from``: the names
    of the tensors from which the exporter computed it.
    """

    kind: str = ""
    folded_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scope:
    """What torch's exporter recorded about an ONNX node.

    ``module``: the path of the ``nn.Module`` that ran the operator (``layer.0``). ``operator``: the torch operator
    from which the node was made (``aten.linear.default``).
    """

    module: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Body:
    """A subgraph of a node: a branch of an If, or the body of a Loop or Scan.

    Its nodes can also read values of the surrounding graph. ``inputs``, ``outputs``: names of values.
    ``initialisers``: the subgraph's constant tensors by name. ``nodes``: in the file's order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initialisers: Mapping[str, Array]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Draft:
    """The content of an ONNX file's main graph as plain data, with local functions inlined.

    ``inputs``, ``outputs``: as the file declares them. ``initialisers``: stored tensors by name. ``nodes``: first in
    the file's order; the loader sorts them. ``producer``: the exporter's name. ``origins``: what the exporter recorded
    about initialisers and the module's tensors, by name. ``scopes``: what it recorded about each node, by node name.
    ``bodies``: subgraphs, by node name and then by attribute; node names are unique across all graphs. ``stated``:
    shapes of values that nodes write, stated in the file or inferred; filled only if the file has subgraphs.
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
    """The content of an ONNX file's main graph while the loader changes it in place.

    ``initialisers``: stored tensors by name. ``origins``: what the exporter recorded about initialisers and the
    module's tensors, by name. ``nodes``: in topological order. ``scopes``: what it recorded about each node, by the
    node's name. ``used``: all names of values in use.
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
        """Return a name that no value has yet, and reserve it: ``name``, with a number appended if it is in use."""
        k, free = 2, name
        while free in self.used:
            free, k = f"{name}_{k}", k + 1
        self.used.add(free)
        return free

    def float_weight(self, name: str) -> Array | None:
        """Return the initialiser named ``name``; None if there is none, or if it has no floating-point type."""
        array = self.initialisers.get(name)
        return array if array is not None and array.dtype in roles.FLOATS else None
