"""The plain attributes that a forward reads: numbers, flags, tensors and containers of them that are constants in what
is traced, so that a plan holds for as long as they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Types of which a value says all that there is to know."""

Owner = tuple[int, tuple[str, ...]]
"""Who has an attribute: a module, by its position in the walk over all of them, or a record that it holds, such as a
configuration, by the attributes that lead to it."""

_DEPTH = 2


@dataclass(frozen=True, slots=True)
class Read:
    """Attributes of one owner, with the values that a forward found there. Tensors are compared by identity, and 1, 1.0
    and True are three."""

    owner: Owner
    get: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]

    def holds(self, attributes: Sequence[dict[str, Any]]) -> bool:
        """Whether they have these values still, given the attributes of all modules."""
        at, path = self.owner
        place = attributes[at]
        try:
            for name in path:
                place = place[name].__dict__
            found = self.get(place)
            return all(map(is_, found, self.values)) or all(map(_same, found, self.values))
        except (LookupError, AttributeError, RuntimeError, ValueError):
            return False


class Reads:
    """What was read while it listened."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.owners: dict[int, Owner] = {}
        self.kinds: set[type] = {nn.Module}
        self.found: dict[tuple[Owner, str], Any] = {}
        self.asked: set[tuple[Owner, str]] = set()
        self.fresh: set[tuple[Owner, str]] = set()
        """What was set before it was asked for: attributes that a forward gives, and does not depend on."""
        self.holders: dict[Owner, Any] = {}
        for at, module in enumerate(modules):
            self._look_into(module, (at, ()))

    def _look_into(self, holder: Any, owner: Owner) -> None:
        self.owners.setdefault(id(holder), owner)
        for name, value in vars(holder).items():
            if is_record(value) and id(value) not in self.owners and len(owner[1]) < _DEPTH:
                self.kinds.add(type(value))
                self._look_into(value, (owner[0], (*owner[1], name)))

    def note(self, holder: Any, name: str, value: Any) -> None:
        """An attribute was read."""
        owner = self.owners.get(id(holder))
        if (
            owner is None
            or (owner, name) in self.fresh
            or (type(value) not in PLAIN and name in _BOOKKEEPING)
        ):
            return
        value = _as_found(value)
        if value is not _OTHER and name in object.__getattribute__(holder, "__dict__"):
            self.holders[owner] = holder
            first = self.found.setdefault((owner, name), value)
            if not _same(first, value):
                self.found[owner, name] = _SET

    def note_asked(self, holder: Any, name: str) -> None:
        """An attribute is about to be read, whether or not it is there."""
        owner = self.owners.get(id(holder))
        if owner is not None and (owner, name) not in self.fresh:
            self.asked.add((owner, name))

    def note_set(self, holder: Any, name: str) -> None:
        """An attribute was set."""
        owner = self.owners.get(id(holder))
        if owner is not None and (owner, name) not in self.asked:
            self.fresh.add((owner, name))

    def given(self, module: nn.Module, before: dict[str, Any]) -> dict[str, Any]:
        """The attributes of a module that the forward only gives, where these are tensors, plain values or containers
        of such. ``before``: what it had when the forward began."""
        owner = self.owners[id(module)]
        return {
            name: value
            for name, value in vars(module).items()
            if (owner, name) in self.fresh
            and value is not before.get(name, _SET)
            and _as_found(value) is not _OTHER
        }

    def listed(self) -> tuple[Read, ...]:
        """What a plan depends on. What the forward itself sets is not among it: what it read there has another value
        now, when all is as it was before."""
        rows: dict[tuple[Owner, bool], dict[str, Any]] = {}
        for (owner, name), value in self.found.items():
            now = vars(self.holders[owner]).get(name, _SET)
            if _same(value, now):  # what is a copy stands apart: the others are most often the very same
                rows.setdefault((owner, value is now), {})[name] = value
        return tuple(Read(owner, _getter(list(row)), (*row.values(),)) for (owner, _), row in rows.items())


_SET, _OTHER = object(), object()
_BOOKKEEPING = frozenset(vars(nn.Module()))
"""What every module keeps of its parts, hooks and tensors; others see to these."""
_SEQUENCES = (list, tuple, torch.Size)


def _as_found(value: Any) -> Any:
    """A plain value, a tensor, or a copy of a container of such; `_OTHER` for anything else."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, torch.Tensor):
        return value
    if kind in (*_SEQUENCES, set, frozenset):
        parts = [_as_found(part) for part in value]
        if kind is tuple and all(map(is_, parts, value)):
            return value  # which is soon compared
        return _OTHER if any(part is _OTHER for part in parts) else kind(parts)
    if kind is dict:
        parts = [_as_found(part) for part in value.values()]
        return _OTHER if any(part is _OTHER for part in parts) else dict(zip(value, parts, strict=True))
    return _OTHER


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return a is not _SET
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _SEQUENCES:
        return len(a) == len(b) and all(map(_same, a, b))
    if kind is dict:
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    return bool(a == b) if kind in (set, frozenset) else kind in PLAIN and repr(a) == repr(b)  # 0 is not −0


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    (name,) = names
    return lambda attributes: (attributes[name],)


@contextmanager
def reads_of(modules: Sequence[nn.Module]) -> Iterator[Reads]:
    """A block in which what is read of the modules' attributes, and of records that they hold, is noted."""
    reads = Reads(modules)
    plain = {kind: kind.__getattribute__ for kind in reads.kinds}
    own = {kind: "__getattribute__" in vars(kind) for kind in reads.kinds}

    def noting(get: Any) -> Any:
        def noted(holder: Any, name: str) -> Any:
            reads.note_asked(holder, name)
            value = get(holder, name)
            reads.note(holder, name, value)
            return value

        return noted

    set_plainly = nn.Module.__setattr__

    def set_and_noted(module: nn.Module, name: str, value: Any) -> None:
        set_plainly(module, name, value)
        reads.note_set(module, name)

    try:
        nn.Module.__setattr__ = set_and_noted  # type: ignore[assignment, method-assign]
        for kind, get in plain.items():
            with suppress(TypeError):  # a class of C's does not let itself be changed
                kind.__getattribute__ = noting(get)  # type: ignore[method-assign]
        yield reads
    finally:
        nn.Module.__setattr__ = set_plainly  # type: ignore[method-assign]
        for kind, get in plain.items():
            with suppress(TypeError, AttributeError):
                if own[kind]:
                    kind.__getattribute__ = get  # type: ignore[method-assign]
                else:
                    del kind.__getattribute__


def is_record(value: Any) -> bool:
    """Whether an object is there for its attributes: neither a module, nor a tensor, nor something to call."""
    kind = type(value)
    return (
        kind.__module__ != "builtins"
        and hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, (type, torch.Tensor, torch.Generator, dict, list, set, tuple))
    )
