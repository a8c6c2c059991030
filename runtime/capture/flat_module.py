"""A model as a function of tensors alone, from a flat tuple to a flat tuple, as tracers take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.capture.functional_call import slots
from rematplan.runtime.capture.hidden_tensors import check_no_hidden_tensors
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.guards.attributes import Reads


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for a tensor, by its place among those that a compiled plan gives."""

    at: int


@dataclass(frozen=True, slots=True)
class Given:
    """Stands for something that the caller has given, by its place among the leaves of the arguments."""

    at: int


@dataclass(frozen=True, slots=True)
class Own:
    """Stands for a parameter or buffer of the model, by its name, in an attribute that the forward sets."""

    at: str


def flattened(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """A tree's leaves and structure. A size is a leaf: put together again it would be a plain tuple."""
    return pytree.tree_flatten(tree, is_leaf=lambda one: isinstance(one, torch.Size))


_LEAVES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})
"""Types of arguments that are leaves themselves."""


def flattened_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves and the structure of ``(args, kwargs)``, as `flattened` returns them.

    Calls whose arguments are all leaves share one structure object, which compares with itself by identity.
    """
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, _flat_spec(len(args), tuple(kwargs))
    return flattened((args, kwargs))


@lru_cache(maxsize=256)
def _flat_spec(positional: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    return flattened(((0,) * positional, dict.fromkeys(names, 0)))[1]


def tensors_in(leaves: list[Any]) -> list[torch.Tensor]:
    """The tensors among the leaves, each once."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def refill(arguments: Any, left: Any) -> Any:
    """The caller's ``arguments``, whose lists and dictionaries get what a forward ``left`` in those of its own."""
    if type(arguments) is not type(left):
        return left
    if isinstance(arguments, dict):
        parts = {key: refill(arguments[key], one) if key in arguments else one for key, one in left.items()}
        for key in arguments.keys() - parts.keys():
            del arguments[key]
        for key, one in parts.items():  # some classes have no `update`
            arguments[key] = one
        return arguments
    if not isinstance(arguments, (list, tuple)):
        return left
    items = [*map(refill, arguments, left), *left[len(arguments) :]]
    if isinstance(arguments, list):
        arguments[:] = items
    elif not all(map(is_, arguments, items)):
        return left
    return arguments


class FlatModel(nn.Module):
    """The model called as ``leaves`` and ``spec`` say, as a function of the tensors among them.

    Its first call leaves behind how what it gives is put together again: ``outputs``, the structure of the results, of
    the attributes that the forward gives (a dictionary by module, of dictionaries) and of the arguments if it leaves
    others in their lists and dictionaries than were there, and ``constants``, its leaves, with a `Place` where one of
    the ``count`` tensors goes. ``attributes`` are the positions of those that nothing but attributes give. ``counted``:
    numbers in attributes that the forward has changed, by the module's place and their names.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        leaves: list[Any],
        spec: pytree.TreeSpec,
        reads: Reads,
    ) -> None:
        super().__init__()
        self.model, self._forward, self._reads = model, forward, reads
        self.training = model.training
        first: dict[int, str] = {}  # of the places of a tied tensor
        self._names = {name: first.setdefault(id(t), name) for name, t in slots(model).items()}
        at: dict[int, int] = {}
        self._leaves = [
            (at.setdefault(id(leaf), len(at)), None) if isinstance(leaf, torch.Tensor) else (None, leaf)
            for leaf in leaves
        ]
        self._spec = spec
        self.outputs: pytree.TreeSpec
        self.constants: list[Any] = []
        self.count = 0  # of tensors among the outputs
        self.attributes: frozenset[str] = frozenset()
        self.counted: dict[int, dict[str, Any]] = {}

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the model gives, each once, none of them another's view."""
        leaves = [leaf if at is None else tensors[at] for at, leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        modules = list(self.model.modules())
        before = [dict(vars(m)) for m in modules]
        results = self._forward(*args, **kwargs)
        given = {at: self._taken(m, had) for at, (m, had) in enumerate(zip(modules, before, strict=True))}
        counted = {
            at: _changed_numbers(vars(m), had)
            for at, (m, had) in enumerate(zip(modules, before, strict=True))
        }
        self.counted = {at: numbers for at, numbers in counted.items() if numbers}
        # A recurrent layer lists its weights anew: they are no results, and stay those that an optimizer changes.
        names = {
            id(t): Own(self._names[name]) for name, t in slots(self.model).items() if name in self._names
        }
        leaves_given, spec_given = flattened({at: one for at, one in given.items() if one})
        given = pytree.tree_unflatten([names.get(id(one), one) for one in leaves_given], spec_given)
        left = self._left((args, kwargs), leaves)
        flat, self.outputs = flattened((results, given, left))
        outputs = {id(o): o for o in flat if isinstance(o, torch.Tensor)}
        if not outputs:
            check_no_hidden_tensors(flat, f"{type(self.model).__name__} gives nothing but", True)
        if any(o.retains_grad for o in outputs.values()):
            raise ModelError(
                f"{type(self.model).__name__} keeps the gradient of a tensor that it gives (retain_grad), and a "
                f"planned step keeps those of parameters and inputs alone"
            )
        places = {of: Place(at) for at, of in enumerate(outputs)}
        self.constants, self.count = [places.get(id(o), o) for o in flat], len(outputs)
        returned = {id(o) for o in flattened((results, left))[0]}
        self.attributes = frozenset(str(place.at) for of, place in places.items() if of not in returned)
        own = {id(t) for t in (*tensors, *self.model.parameters(), *self.model.buffers())}
        # A view has a tangent of its own only as a copy.
        return tuple(o.clone() if o._is_view() or of in own else o for of, o in outputs.items())

    def _left(self, arguments: Any, leaves: list[Any]) -> Any:
        """The arguments after the forward, those that were given as `Given`; None if they are as they were."""
        left, spec = flattened(arguments)
        if spec == self._spec and all(map(is_, left, leaves)):
            return None
        at = {id(leaf): Given(at) for at, leaf in enumerate(leaves)}
        return pytree.tree_unflatten([at.get(id(leaf), leaf) for leaf in left], spec)

    def _taken(self, module: nn.Module, before: dict[str, Any]) -> dict[str, Any]:
        """The attributes that the forward gives a module, which gets back what it had."""
        given = self._reads.given(module, before)
        for name in given:
            if name in before:
                vars(module)[name] = before[name]
            else:
                del vars(module)[name]
        return given


def _changed_numbers(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The numbers among attributes that were numbers before, and others."""
    kinds = (int, float)
    return {
        name: value
        for name, value in now.items()
        if type(value) in kinds and type(before.get(name)) in kinds and value != before[name]
    }
