"""The Python state that a step may change: attributes of modules, and what their hooks hold."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from rematplan.module.verification import same_bits
from rematplan.runtime.capture.restore_state import STANDARD_CONTAINERS, containers_below
from rematplan.runtime.graph.generator_states import state_of, states_restored
from rematplan.runtime.guards.attributes import is_record
from rematplan.runtime.guards.containers import refill
from rematplan.runtime.guards.globals import slot_names
from rematplan.runtime.guards.module_state import HOOKS

PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that each module has for PyTorch's own use."""
SHARDING = ("torch.distributed.", "torch.nn.parallel.")
"""How the names of the Python modules begin whose classes track what other processes do."""
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of parameters that have their hooks, by number."""


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
GENERATOR_STATE = "random state"
"""The beginning of the text that represents the state of a generator."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An object whose named values a step may change."""

    name: str
    """The object's name, for messages."""
    read: Callable[[], dict[str, Any]]
    write: Callable[[dict[str, Any]], None]
    """Sets the values to what ``read`` returned."""


@dataclass(frozen=True, slots=True)
class HookPlace:
    """A dictionary of hooks by number."""

    of: str
    """The module or parameter that they belong to."""
    of_gradients: bool
    """Whether they run in a backward."""
    hooks: dict[int, Callable[..., Any]]


def hook_places(model: nn.Module) -> list[HookPlace]:
    """Return the places of all hooks of a model's modules and parameters."""
    found = []
    for name, module in model.named_modules():
        for place in HOOKS:
            found.append(
                HookPlace(name or type(module).__name__, "backward" in place, getattr(module, place))
            )
    for name, parameter in model.named_parameters():
        for place in GRADIENT_HOOKS:
            found.append(HookPlace(name, True, getattr(parameter, place, None) or {}))
    return [place for place in found if place.hooks]


def holders_of(model: nn.Module) -> list[Holder]:
    """Return what holds state, each once: modules, except those of data parallelism, records in modules' attributes,
    and hooks."""
    found: dict[int, Holder] = {}
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(SHARDING):
            found.setdefault(id(module), _attributes(name, module))
        for key, value in vars(module).items():
            if is_record(value):
                found.setdefault(id(value), _attributes(f"{name}.{key}".lstrip("."), value))
    for place in hook_places(model):
        for hook in place.hooks.values():
            for owner, holder in _of_hook(hook, f"hook {title(hook)} of {place.of}"):
                found.setdefault(owner, holder)
    return list(found.values())


def title(function: Any) -> str:
    """Return the name of a function or of the class of another object, without the functions around it."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name).rpartition("<locals>.")[2]


def _attributes(name: str, owner: Any) -> Holder:
    """Return what reads and writes the attributes of ``owner``, in its slots and ``__dict__``. Writing deletes
    attributes that are not among the values."""
    slots = [] if isinstance(owner, nn.Module) else slot_names(type(owner))

    def read() -> dict[str, Any]:
        return {k: getattr(owner, k) for k in slots if hasattr(owner, k)} | getattr(owner, "__dict__", {})

    def write(values: dict[str, Any]) -> None:
        """Set the attributes of ``owner`` to ``values``, in place, and delete all others."""
        for k in slots:
            if k in values:
                setattr(owner, k, values[k])
            elif hasattr(owner, k):
                delattr(owner, k)
        if hasattr(owner, "__dict__"):
            vars(owner).clear()
            vars(owner).update({k: v for k, v in values.items() if k not in slots})

    return Holder(name, read, write)


def _is_pytorchs(value: Any) -> bool:
    """Return whether an object is PyTorch's own, such as the state of FSDP2, which must not be restored."""
    return type(value).__module__.startswith("torch.")


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of the user's, with attributes that a step may change."""
    if isinstance(value, (nn.Module, torch.Tensor, type, ModuleType)) or _is_pytorchs(value):
        return False
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def _of_hook(hook: Any, name: str) -> Iterator[tuple[int, Holder]]:
    """Yield, each with its id, what holds the state of a hook: the object that it is or is bound to, arguments that it
    is given by `functools.partial`, or variables outside of its code."""
    if isinstance(hook, partial):
        given = {**{str(i): a for i, a in enumerate(hook.args)}, **hook.keywords}
        yield id(hook), Holder(name, lambda: dict(given), lambda _: None)
        for key, value in given.items():
            if _is_object(value):
                yield id(value), _attributes(f"{name}.{key}", value)
        yield from _of_hook(hook.func, name)
        return
    function = getattr(hook, "__func__", hook)
    owner = getattr(hook, "__self__", None if function is hook and hasattr(hook, "__code__") else hook)
    if owner is not None and _is_object(owner):
        yield id(owner), _attributes(name, owner)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    shared = {key: value for key in code.co_names if _is_state(value := function.__globals__.get(key))}

    def read() -> dict[str, Any]:
        return {
            **{k: function.__globals__[k] for k in shared},
            **{k: c.cell_contents for k, c in cells.items()},
        }

    def write(values: dict[str, Any]) -> None:
        function.__globals__.update({key: values[key] for key in shared})
        for key, cell in cells.items():
            cell.cell_contents = values[key]

    if cells or shared:
        yield id(function), Holder(name, read, write)


def _is_state(value: Any) -> bool:
    kind = type(value)
    return (
        kind in STANDARD_CONTAINERS
        or kind in (bool, int, float)
        or isinstance(value, (torch.Tensor, np.ndarray))
    )


def leaves(name: str, value: Any, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, texts, tensors, arrays and random generators in a value, also inside of containers, each with
    its path. A set is one text; other objects are left out."""
    kind = type(value)
    if id(value) in seen:
        return
    if kind in PLAIN or isinstance(value, (torch.Tensor, np.ndarray)) or kind in GENERATORS:
        yield name, value
    elif kind is set:
        yield name, repr(sorted(map(repr, value)))
    elif kind in STANDARD_CONTAINERS or kind is tuple:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{name}[{key!r}]", one, seen | {id(value)})


def copied_state(holders: list[Holder]) -> dict[str, Any]:
    """Return copies of all values of `leaves` that the holders have now, by name, except parameters and what PyTorch
    keeps in each module. Tensors and arrays of numbers are copied as tensors; other values become text."""
    return {
        path: _copy(leaf)
        for holder in holders
        for key, value in holder.read().items()
        if key not in OF_MODULES
        for path, leaf in leaves(f"{holder.name}.{key}".lstrip("."), value)
        if not isinstance(leaf, nn.Parameter)
    }


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if type(leaf) in GENERATORS:
        return f"{GENERATOR_STATE} {zlib.crc32(repr(state_of(leaf)).encode()):08x}"
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iufb":
        return torch.from_numpy(leaf.copy())
    return repr(leaf)


@contextmanager
def same_state(holders: list[Holder]) -> Iterator[None]:
    """Restore what the holders hold after the block: their values, and the content of containers, tensors and random
    generators among them."""
    values = [(holder, holder.read()) for holder in holders]
    containers = containers_below(value for _, namespace in values for value in namespace.values())
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    generators: dict[int, Any] = {}
    for _, namespace in values:
        for key, value in namespace.items():
            for _, leaf in leaves(key, value):
                if isinstance(leaf, torch.Tensor):
                    tensors[id(leaf)] = leaf, leaf.detach().clone()
                elif type(leaf) in GENERATORS:
                    generators[id(leaf)] = leaf
    try:
        with states_restored(generators.values()):
            yield
    finally:
        for holder, was in values:
            holder.write(was)
        for container, content in containers:
            refill(container, content)
        for tensor, kept in tensors.values():
            if tensor.dtype != kept.dtype or tensor.shape != kept.shape:
                tensor.data = kept
            elif not same_bits(tensor.detach(), kept):
                with torch.no_grad():
                    tensor.copy_(kept)
