"""Changes of Python state that the forward makes, and that a planned call repeats after its plan has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rematplan.ir import ModelError
from rematplan.runtime.guards.containers import add, copied, refilled
from rematplan.runtime.guards.counted_numbers import Expression, evaluated
from rematplan.runtime.guards.places import Attributes, AttributesByName, ClassAttributes, Place
from rematplan.runtime.guards.read_numbers import Counted


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """A change of Python state that a planned call makes after its forward."""

    place: Place
    """Where the variable or attribute is."""
    name: str
    how: str
    """What is stored: "set" the value, "refill" its content, "add" items, "count" ``expression``, "number" from the
    step. "remove" deletes the name."""
    expression: Expression = None
    read: bool = False
    """Whether the forward reads what it changes, so that its graph may be another one in the next call."""


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """A check of a dictionary in which the forward stores ``keys``, in this order, before it reads the dictionary. It
    holds if the dictionary has exactly the first n of ``keys`` before the call, for any n: new keys are added at the
    end."""

    place: Place
    name: str
    keys: tuple[Any, ...]

    def holds(self, attributes: Attributes) -> bool:
        """Return whether the dictionary has the first n of the keys, in their order. ``attributes``: the ``__dict__``
        of each module, by position."""
        now = self.place.find(attributes)[self.name]
        return isinstance(now, dict) and tuple(now) == self.keys[: len(now)]


@dataclass(frozen=True, slots=True)
class IsNone:
    """A check of a value that the forward changes, and that it only compares with None."""

    place: Place
    name: str
    none: bool
    """Whether the value was None when the forward was traced."""

    def holds(self, attributes: Attributes) -> bool:
        """Return whether the value is None now if it was None when traced, and something else if it was not.
        ``attributes``: the ``__dict__`` of each module, by position."""
        return (self.place.find(attributes)[self.name] is None) is self.none


def assign(namespace: Any, name: str, value: Any) -> None:
    """Store a value under a name in a dictionary, class or object's attribute; `ModelError` for another namespace."""
    if isinstance(namespace, AttributesByName):
        holder, attribute = namespace.where[name]
        setattr(holder, attribute, value)
    elif isinstance(namespace, ClassAttributes):
        setattr(namespace.home, name, value)
    elif isinstance(namespace, dict):
        namespace[name] = value
    else:
        raise ModelError(
            f"the forward changes {name}, which a planned one cannot change; change it outside the forward"
        )


def store(writes: Sequence[tuple[Write, Any]], attributes: Attributes) -> None:
    """Change the Python state as a forward does: make each write, with its value, in order. Numbers are computed before
    the first change. ``attributes``: the ``__dict__`` of each module, by position."""
    numbers = [_number(write, value, attributes) for write, value in writes]
    for (write, value), number in zip(writes, numbers, strict=True):
        namespace = write.place.find(attributes)
        if write.how == "remove":
            namespace.pop(write.name, None)
        elif write.how in ("count", "number"):
            assign(namespace, write.name, number)
        elif write.how == "set":
            assign(namespace, write.name, copied(value))
        elif write.how == "add":
            add(namespace[write.name], value)
        else:
            found = refilled(namespace[write.name], value)
            if found is not namespace[write.name]:
                assign(namespace, write.name, found)


def _number(write: Write, value: Any, attributes: Attributes) -> Any:
    """Return the number that a write stores, computed from the state before all writes; None if it stores none."""
    if write.how == "number":
        return evaluated(value.expression, attributes) if isinstance(value, Counted) else value
    return evaluated(write.expression, attributes) if write.how == "count" else None
