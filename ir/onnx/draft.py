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
    """A graph input or output as the ONNX file declares it."""

    name: str
    dtype: str
    """numpy's name of the element type; "" for an output without type."""
    shape: tuple[Dim, ...] | None
    """Numbers, symbols, or None for unknown dimensions; None if their number is unknown."""


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor stored in an ONNX file, whose data are read when ``load`` is called."""

    name: str
    dtype: str
    """numpy's name of the element type."""
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> Array:
        """Return a tensor with the data ``values``."""
        return cls(name, values.dtype.name, values.shape, lambda: values)


@dataclass(frozen=True, slots=True)
class Origin:
    """What torch's exporter recorded about an initialiser, or about a module's tensor that it folded into one."""

    kind: str = ""
    """torch.export's kind of input, such as ``PARAMETER``; empty if not recorded."""
    folded_from: tuple[str, ...] = ()
    """The names of the tensors from which the exporter computed it."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What torch's exporter recorded about an ONNX node."""

    module: str = ""
    """The path of the ``nn.Module`` (``layer.0``)."""
    operator: str = ""
    """The torch operator (``aten.linear.default``)."""
    reads: tuple[str, ...] = ()
    """The module's parameters and buffers that the torch operator reads, in order."""


@dataclass(frozen=True)
class Body:
    """A branch of an If, or the body of a Loop or Scan. Its nodes can also read values of the surrounding graph."""

    inputs: tuple[str, ...]
    """Names of its inputs."""
    outputs: tuple[str, ...]
    """Names of its outputs."""
    initialisers: Mapping[str, Array]
    """Constant tensors by name."""
    nodes: tuple[Node, ...]
    """The nodes in the file's order."""


@dataclass(frozen=True)
class Draft:
    """The content of an ONNX file's main graph as plain data, with local functions inlined."""

    name: str
    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]
    initialisers: Mapping[str, Array]
    """Stored tensors by name."""
    nodes: tuple[Node, ...]
    """The nodes, in the file's order until the loader sorts them."""
    producer: str = ""
    """The exporter's name."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """By name of an initialiser or of a module's tensor."""
    signed: bool = False
    """Whether ``origins`` has all of the module's parameters and buffers."""
    scopes: Mapping[str, Scope] = field(default_factory=dict)
    """By node name."""
    bodies: Mapping[str, Mapping[str, Body]] = field(default_factory=dict)
    """Subgraphs by node name, which is unique across all graphs, and by attribute."""
    stated: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    """Shapes of values that nodes write; empty without subgraphs."""


@dataclass
class Edit:
    """The content of an ONNX file's main graph while the loader changes it in place."""

    initialisers: dict[str, Array]
    """Stored tensors by name."""
    origins: dict[str, Origin]
    """By name of an initialiser or of a module's tensor."""
    nodes: list[Node]
    """The nodes in topological order."""
    scopes: dict[str, Scope]
    """By node name."""
    used: set[str] = field(init=False)
    """All names of values in use."""

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
