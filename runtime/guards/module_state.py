"""The state of a module when it is called: its submodules and their classes, training modes and hooks, and the
properties of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import nn

from rematplan.runtime.graph.compat import TensorGuards
from rematplan.runtime.guards.bulk_comparison import picked
from rematplan.runtime.guards.call_key import like

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Tensor types that the guard in C++ compares without calling Python."""


class StateKey:
    """A hashable wrapper of a tuple that computes its hash only once. When two wrappers are found equal, they share one
    tuple from then on, so that comparing them again is fast."""

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
    """The state of a module and its submodules at a call, as far as a plan depends on it.

    ``attributes``: the ``__dict__`` of the module and of each submodule, each once, in the order of
    ``named_modules()``. ``named``: parameters and buffers, each once, under the names of ``named_parameters`` and
    ``named_buffers``. ``key``: classes and training modes of all modules, hooks of the submodules, and the names and
    properties of the tensors, without their values.
    """

    attributes: list[dict[str, Any]]
    named: dict[str, torch.Tensor]
    key: StateKey


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last state of a module that `ModuleTree` found, to recognise the same state quickly at the next call. Only
    states without hooks in submodules, and with plain strided tensors, are remembered.

    ``kinds``: classes and training modes of the modules. ``tensors``: a check of the tensors' properties. ``key``: the
    state's key.
    """

    kinds: list[Any]
    tensors: TensorGuards
    key: StateKey


class ModuleTree:
    """A list of a module and its submodules, made once, from which `state` reads their state at every call.

    A network has hundreds of submodules and each call looks at all of them, so as much as possible is compared in C.

    Args:
        module: the module. Only its ``__dict__`` and its submodules are kept, to avoid a reference cycle.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_modules())
        self.parts = [m for _, m in named][1:]  # without the module, to avoid a reference cycle
        self.attributes = [m.__dict__ for _, m in named]
        children = [a["_modules"] for a in self.attributes]
        holders = [
            (f"{name}." if name else "", m.__dict__[kind])
            for kind in ("_parameters", "_buffers")
            for name, m in named
        ]
        self.empty = [mapping for mapping in (*children, *(mapping for _, mapping in holders)) if not mapping]
        self.children = [mapping for mapping in children if mapping]
        self.holders = [mapping for _, mapping in holders if mapping]
        self.hooks = [a[kind] for a in self.attributes[1:] for kind in HOOKS]
        self.expected = _values(self.children), _keys(self.children), _keys(self.holders)
        names = [f"{prefix}{key}" for prefix, mapping in holders for key in mapping]
        tensors = _values(self.holders)
        first: dict[int, int] = {}
        places = [first.setdefault(id(t), at) for at, t in enumerate(tensors)]
        again = [
            (at, of) for at, of in enumerate(places) if at != of
        ]  # repeated tensors: tied ones, and None
        self.again, self.of = (picked(column) for column in (zip(*again, strict=True) if again else ((), ())))
        self.absent = picked([at for at in first.values() if tensors[at] is None])
        kept = [at for at in first.values() if tensors[at] is not None]
        self.distinct, self.names = picked(kept), [names[at] for at in kept]
        self.seen: _Seen | None = None

    def state(self, module: nn.Module) -> ModuleState | None:
        """Return the module's present state. Return None if a new tree must be made: the module has other submodules
        than before, or its tensors have other names, are tied differently, or exist where none did before.

        Args:
            module: the module with which the tree was made.
        """
        tensors = _values(self.holders)
        if (
            self.attributes[0] is not module.__dict__
            or any(self.empty)
            or (_values(self.children), _keys(self.children), _keys(self.holders)) != self.expected
            or not all(map(is_, self.again(tensors), self.of(tensors)))
            or any(t is not None for t in self.absent(tensors))
        ):
            return None
        distinct = self.distinct(tensors)
        kinds = [
            type(module),
            *map(type, self.parts),
            *map(dict.get, self.attributes, repeat("training")),
        ]
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


def _values(mappings: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, mappings)))


def _keys(mappings: Sequence[dict[str, Any]]) -> list[str]:
    return list(chain.from_iterable(mappings))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
