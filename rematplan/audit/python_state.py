"""The Python state that a step may change: attributes of modules, and what their hooks hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isroutine
from typing import Any

import numpy as np
import torch
from torch import nn

from rematplan.module.verification import same_bits
from rematplan.runtime.capture.restore_state import CONTAINERS
from rematplan.runtime.guards.attributes import is_record

PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that each module has for PyTorch's own use."""


@dataclass(frozen=True, slots=True)
class Random:
    """How the state of a random number generator is read and set."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


def _set_numpy(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


GENERATORS: Mapping[type, Random] = {
    torch.Generator: Random(lambda g: g.get_state(), lambda g, s: g.set_state(s) and None),
    np.random.Generator: Random(lambda g: copy.deepcopy(g.bit_generator.state), _set_numpy),
    np.random.RandomState: Random(lambda g: g.get_state(), lambda g, s: g.set_state(s)),
    random.Random: Random(lambda g: g.getstate(), lambda g, s: g.setstate(s)),
}


@dataclass(frozen=True, slots=True)
class Holder:
    """An object whose named values a step may change.

    ``name``: for people. ``read``: returns the values. ``write``: sets them to what ``read`` returned.
    """

    name: str
    read: Callable[[], dict[str, Any]]
    write: Callable[[dict[str, Any]], None]


def holders_of(modules: Mapping[str, nn.Module]) -> list[Holder]:
    """Return what holds state: the modules, records in their attributes, and their hooks. ``modules``: by full name."""
    found: dict[int, Holder] = {}
    for name, module in modules.items():
        found.setdefault(id(module), _attributes(f"attribute {name}".rstrip(), module))
        for key, value in vars(module).items():
            if is_record(value):
                found.setdefault(id(value), _attributes(f"attribute {name}.{key}", value))
        for hook in hooks_of(module):
            for holder in _of_hook(hook, name):
                found.setdefault(id(hook), holder)
    return list(found.values())


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks of a module's forward and of its parameters' gradients."""
    places = [module._forward_hooks, module._forward_pre_hooks]
    for parameter in module.parameters(recurse=False):
        places += gradient_hooks(parameter)
    return [hook for place in places for hook in place.values()]


def gradient_hooks(parameter: torch.Tensor) -> list[dict[int, Callable[..., Any]]]:
    """Return the dictionaries that have the hooks of a parameter's gradient, by number."""
    places = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [place for place in places if place]


def _attributes(name: str, owner: Any) -> Holder:
    def read() -> dict[str, Any]:
        return {key: value for key, value in vars(owner).items() if key not in OF_MODULES}

    def write(values: dict[str, Any]) -> None:
        own = vars(owner)
        for key in [k for k in own if k not in OF_MODULES and k not in values]:
            del own[key]
        own.update(values)

    return Holder(name, read, write)


def _of_hook(hook: Callable[..., Any], module: str) -> Iterator[Holder]:
    """Yield what holds the state of a hook: the object that it is or is bound to, or the variables of its closure."""
    title = f"hook {getattr(hook, '__qualname__', type(hook).__name__)} of {module}"
    owner = getattr(hook, "__self__", None) if isroutine(hook) else hook
    if owner is not None and not isinstance(owner, nn.Module) and hasattr(owner, "__dict__"):
        yield _attributes(title, owner)
    cells = (
        dict(zip(getattr(hook.__code__, "co_freevars", ()), hook.__closure__ or (), strict=True))
        if (hasattr(hook, "__code__") and hasattr(hook, "__closure__"))
        else {}
    )
    if cells:

        def write(values: dict[str, Any]) -> None:
            for name, value in values.items():
                cells[name].cell_contents = value

        yield Holder(title, lambda: {name: cell.cell_contents for name, cell in cells.items()}, write)


def leaves(name: str, value: Any, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, texts, tensors and random generators in a value, containers' included, each with its path."""
    kind = type(value)
    if id(value) in seen:
        return
    if kind in PLAIN or isinstance(value, (torch.Tensor, np.ndarray)) or kind in GENERATORS:
        yield name, value
    elif kind in CONTAINERS or kind is tuple:
        inner = seen | {id(value)}
        pairs = value.items() if isinstance(value, dict) else enumerate(() if kind is set else value)
        for key, one in pairs:
            yield from leaves(f"{name}[{key!r}]" if kind is not list else f"{name}[{key}]", one, inner)
        if kind is set:
            yield name, repr(sorted(map(repr, value)))


def state_of(holders: list[Holder]) -> dict[str, Any]:
    """Return copies of all values that the holders have now, by name."""
    found = {}
    for holder in holders:
        for key, value in holder.read().items():
            for path, leaf in leaves(f"{holder.name}.{key}", value):
                found[path] = _copy(leaf)
    return found


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if type(leaf) in GENERATORS:
        return repr(GENERATORS[type(leaf)].read(leaf))
    return (
        torch.from_numpy(leaf.copy())
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iufb"
        else repr(leaf)
    )


@contextmanager
def same_state(holders: list[Holder]) -> Iterator[None]:
    """Restore what the holders hold after the block: their values, and the content of containers, tensors and random
    generators among them."""
    values = [(holder, holder.read()) for holder in holders]
    containers: dict[int, tuple[Any, Any]] = {}
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    generators: dict[int, tuple[Any, Any]] = {}
    for _, namespace in values:
        for key, value in namespace.items():
            _containers(value, containers)
            for _, leaf in leaves(key, value):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                    tensors[id(leaf)] = leaf, leaf.detach().clone()
                elif type(leaf) in GENERATORS:
                    generators[id(leaf)] = leaf, GENERATORS[type(leaf)].read(leaf)
    try:
        yield
    finally:
        for holder, was in values:
            holder.write(was)
        for container, content in containers.values():
            container.clear()
            (container.update if hasattr(container, "update") else container.extend)(content)
        for tensor, kept in tensors.values():
            if not same_bits(tensor.detach(), kept):
                with torch.no_grad():
                    tensor.copy_(kept)
        for generator, state in generators.values():
            GENERATORS[type(generator)].write(generator, state)


def _containers(value: Any, found: dict[int, tuple[Any, Any]]) -> None:
    if type(value) in CONTAINERS and id(value) not in found:
        found[id(value)] = value, copy.copy(value)
    elif type(value) is not tuple:
        return
    for one in value.values() if isinstance(value, dict) else value:
        _containers(one, found)
