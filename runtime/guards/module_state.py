"""The state of a module when it is called: its submodules and their classes, training modes and hooks, and the
properties of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from operator import getitem, is_
from typing import Any

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.runtime.graph.compat import TensorGuards, parametrizations_are_cached
from rematplan.runtime.guards.bulk_comparison import Namespaces, picked
from rematplan.runtime.guards.call_key import like

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_ALL = tuple(vars(torch.nn.modules.module)[f"_global{kind}"] for kind in HOOKS)
"""The hooks that `torch.nn.modules.module.register_module_forward_hook` and its like add to all modules."""
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Tensor types that the guard in C++ compares without calling Python."""


class StateKey:
    """A hashable tuple whose hash is computed once. Two keys that were found equal share a tuple afterwards."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: tuple[Any, ...]) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StateKey):
            return NotImplemented
        equal = self.value is other.value or (self._hash == other._hash and self.value == other.value)
        if equal:
            self.value = other.value
        return equal


@dataclass(frozen=True)
class ModuleState:
    """The state of a module and its submodules at a call, as far as a plan depends on it."""

    attributes: Namespaces
    """The ``__dict__`` of each module, in the order of ``named_modules()``."""
    named: dict[str, torch.Tensor]
    """Parameters and buffers, each once, under the names of ``named_parameters`` and ``named_buffers``."""
    key: StateKey
    """Classes and modes of all modules, hooks of submodules, names and properties, without values, of tensors."""

    def check_parametrizations(self, name: str) -> None:
        """Raise `UsageError` if the module has parametrizations and is called in a block that caches them. ``name``:
        the module's name, for the message."""
        if parametrizations_are_cached() and any(
            "parametrizations" in a["_modules"] for a in self.attributes
        ):
            raise UsageError(
                f"{name} is called in torch.nn.utils.parametrize.cached(), which shares tensors between calls; a "
                f"planned step computes them in each call; leave that block, or enter it inside the forward"
            )


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last state that `ModuleTree` found, to recognise it fast; only without inner hooks, with plain tensors."""

    kinds: list[Any]
    """Classes and training modes of the modules."""
    tensors: TensorGuards
    """A check of the tensors' properties."""
    key: StateKey
    """The state's key."""


class ModuleTree:
    """A list of a module and its submodules, made once, from which `state` reads their state at every call, mostly in
    C. It keeps the module's ``__dict__`` and submodules, not the module: a reference cycle otherwise."""

    def __init__(self, module: nn.Module) -> None:
        """List the submodules of ``module``, their hooks, and the names under which they have parameters and buffers. A
        tied tensor counts under its first name."""
        named = list(module.named_modules())
        self.parts = [m for _, m in named][1:]  # without the module, to avoid a reference cycle
        self.attributes = Namespaces(m.__dict__ for _, m in named)
        children = [("", a["_modules"]) for a in self.attributes]
        holders = [
            (f"{name}." if name else "", m.__dict__[kind])
            for kind in ("_parameters", "_buffers")
            for name, m in named
        ]
        self.empty = [mapping for _, mapping in (*children, *holders) if not mapping]
        self.filled = [mapping for _, mapping in (*children, *holders) if mapping]
        self.hooks = [a[kind] for a in self.attributes[1:] for kind in HOOKS] + list(_OF_ALL)
        slots = [
            (f"{prefix}{key}", mapping, key) for prefix, mapping in (*children, *holders) for key in mapping
        ]
        self.mappings, self.keys = [mapping for _, mapping, _ in slots], [key for _, _, key in slots]
        found = list(map(getitem, self.mappings, self.keys))
        count = sum(len(mapping) for _, mapping in children)
        self.submodules, tensors, names = found[:count], found[count:], [name for name, _, _ in slots[count:]]
        # Of three tensors of which the third is the first again, `places` is [0, 1, 0], and `again` [(2, 0)].
        first: dict[int, int] = {}
        places = [first.setdefault(id(t), at) for at, t in enumerate(tensors)]
        again = [(at, of) for at, of in enumerate(places) if at != of]
        self.again, self.of = (picked(column) for column in (zip(*again, strict=True) if again else ((), ())))
        self.absent = picked([at for at in first.values() if tensors[at] is None])
        kept = [at for at in first.values() if tensors[at] is not None]
        self.distinct, self.names = picked(kept), [names[at] for at in kept]
        self.all_distinct = len(kept) == len(tensors)
        self.seen: _Seen | None = None

    def state(self, module: nn.Module) -> ModuleState | None:
        """Return the module's state, or None if a new tree is needed: other submodules, names or ties of tensors. A
        state of plain tensors without hooks is kept, and compared first in the next call. ``module``: the one of the
        tree, or one that shares its ``__dict__``."""
        distinct = self._tensors(module)
        if distinct is None:
            return None
        kinds = [type(module), *map(type, self.parts), *map(dict.get, self.attributes, repeat("training"))]
        named = dict(zip(self.names, distinct, strict=True))
        seen, hooked = self.seen, any(self.hooks)
        if seen is not None and not hooked and seen.kinds == kinds and seen.tensors.check(*distinct):
            return ModuleState(self.attributes, named, seen.key)
        if len(set(map(id, distinct))) < len(distinct) or any(t is None for t in distinct):
            return None
        hooks = tuple((at, *hooks) for at, hooks in enumerate(self.hooks) if hooks)
        key = StateKey((tuple(kinds), hooks, tuple(self.names), tuple(map(like, distinct))))
        if distinct and not hooked and all(map(_is_plain, distinct)):
            self.seen = _Seen(
                kinds, TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None), key
            )
        return ModuleState(self.attributes, named, key)

    def _tensors(self, module: nn.Module) -> list[Any] | None:
        """Return the present parameters and buffers, each once, in the order of ``names``; None if submodules, names or
        ties differ from the tree's."""
        if (
            self.attributes[0] is not module.__dict__
            or any(self.empty)
            or list(chain.from_iterable(self.filled)) != self.keys
        ):
            return None
        try:
            found = list(map(getitem, self.mappings, self.keys))
        except KeyError:  # a key has moved to another mapping
            return None
        count = len(self.submodules)
        if found[:count] != self.submodules:
            return None
        tensors = found[count:]
        if self.all_distinct:
            return tensors
        tied = all(map(is_, self.again(tensors), self.of(tensors)))
        return list(self.distinct(tensors)) if tied and all(t is None for t in self.absent(tensors)) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the guard in C++ tells a tensor from all others with another key."""
    is_leaf = type(tensor) is nn.Parameter or not tensor.requires_grad
    return type(tensor) in _PLAIN and is_leaf and tensor.layout is torch.strided and not tensor.is_nested
