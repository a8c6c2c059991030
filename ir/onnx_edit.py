"""A draft while the loader changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rematplan.ir import onnx_roles as roles
from rematplan.ir.graph import Node
from rematplan.ir.onnx_draft import Array, Origin, Scope


@dataclass
class Edit:
    """A draft while it is changed."""

    initialisers: dict[str, Array]
    origins: dict[str, Origin]
    nodes: list[Node]
    scopes: dict[str, Scope]
    taken: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = {*self.initialisers, *(o for n in self.nodes for o in n.outputs)}
        self.taken.update(i for n in self.nodes for i in n.inputs)

    def fresh(self, name: str) -> str:
        """The name, or one like it that is free."""
        k, free = 2, name
        while free in self.taken:
            free, k = f"{name}_{k}", k + 1
        self.taken.add(free)
        return free

    def float_weight(self, name: str) -> Array | None:
        """The initialiser of that name if it is of reals."""
        array = self.initialisers.get(name)
        return array if array is not None and array.dtype in roles.FLOATS else None
