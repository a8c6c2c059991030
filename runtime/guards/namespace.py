"""The names in a namespace, such as the attributes of a module, and the values that they had before a forward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rematplan.runtime.guards.looked_up import LookedUp
from rematplan.runtime.guards.places import Owner, Place
from rematplan.runtime.guards.repeated_writes import assign
from rematplan.runtime.guards.snapshots import UNSET


@dataclass
class Namespace:
    """Some names and their values before the forward."""

    place: Place
    values: Any
    before: dict[str, Any]
    """The values before the forward, by name; `UNSET` where there was none and the forward may set one."""
    owner: Owner | None = None
    """The module or record whose attributes they are; None for others."""
    uses: Callable[[str], Collection[str]] | None = None
    """A function that returns the uses of a name in all functions' bytecode. None if accesses are recorded while the
    forward runs, or if code reaches the values by other names."""
    key: int = 0
    """The id of the namespace."""
    left_out: frozenset[str] | set[str] = frozenset()
    """Names that are not compared: tensors, and lists of parameters and buffers, whose content a trace replaces."""

    def now(self, name: str) -> Any:
        """Return the present value of a name; `UNSET` if there is none. A dictionary counts as itself if `LookedUp`
        stands for it."""
        try:
            value = self.values[name]
        except (LookupError, AttributeError, ValueError):
            return UNSET
        return value.of if type(value) is LookedUp else value

    def changed(self) -> list[str]:
        """Return the names whose values are other objects than before the forward, or exist only before or after it."""
        changed = [name for name, value in self.before.items() if self.now(name) is not value]
        if self.owner is not None and len(self.values) != len(self.before):
            changed += [name for name in self.values if name not in self.before and name not in self.left_out]
        return changed

    def restore(self) -> None:
        """Give changed names their earlier values, in place, and delete names that are new."""
        for name in self.changed():
            if self.before.get(name, UNSET) is not UNSET:
                assign(self.values, name, self.before[name])
            else:
                del self.values[name]
