"""A model as a function from a flat tuple of tensors to a flat tuple of tensors, which is what tracers can capture."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError, UsageError
from rematplan.runtime.capture.functional_call import slots
from rematplan.runtime.capture.hidden_tensors import check_no_hidden_tensors, hides_tensors
from rematplan.runtime.capture.open_classes import OPENED, open_classes, with_opened_objects
from rematplan.runtime.capture.restore_state import SameObjects
from rematplan.runtime.graph.compat import is_functional_tensor, pytree
from rematplan.runtime.guards.call_key import is_cast_anew
from rematplan.runtime.guards.containers import containers_in
from rematplan.runtime.guards.module_tensors import ModuleTensors
from rematplan.runtime.guards.python_state import PythonState
from rematplan.runtime.guards.read_numbers import check_uncounted
from rematplan.runtime.guards.repeated_writes import Write
from rematplan.runtime.guards.state_changes import Changes, find_changes


def check_module(model: object) -> None:
    """Raise `UsageError` unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")


def check_call(model: object, args: object, kwargs: object) -> None:
    """Raise `UsageError` unless these are a module, a sequence of arguments, and arguments by name or None."""
    check_module(model)
    if not isinstance(args, (tuple, list)):
        raise UsageError(
            f"args is a {type(args).__name__}; write the arguments of the model as a tuple, such as (x,)"
        )
    if not isinstance(kwargs, (Mapping, NoneType)):
        raise UsageError(f"kwargs is a {type(kwargs).__name__}; write it as a dictionary by argument name")


@dataclass(frozen=True, slots=True)
class ResultTensor:
    """A placeholder for an output tensor of the planned step in what a planned model returns."""

    at: int
    """The tensor's position among the step's outputs."""


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """A placeholder for an object that the caller passed in what a planned model returns; the object replaces it."""

    at: int
    """The object's position among the leaves of the arguments."""


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A placeholder for a parameter or buffer of the model in what a planned model returns; that tensor replaces it."""

    at: str
    """The parameter's or buffer's name in the model."""


def flattened(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves and the structure of a pytree. A `torch.Size` counts as a leaf; otherwise it would be rebuilt
    as a plain tuple."""
    return pytree.tree_flatten(tree, is_leaf=lambda one: isinstance(one, torch.Size))


_LEAVES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})
"""Types whose objects are leaves of a pytree."""


def flattened_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return leaves and pytree structure of ``(args, kwargs)``. Flat calls of one form share a structure object; in
    other calls, objects with tensors are opened (`open_classes`)."""
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        # Equal objects are compared quickly.
        return leaves, _flat_spec(len(args), tuple(kwargs))
    open_classes((args, kwargs))
    return flattened(with_opened_objects((args, kwargs)))


@lru_cache(maxsize=256)
def _flat_spec(positional: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    return flattened(((0,) * positional, dict.fromkeys(names, 0)))[1]


def tensors_in(leaves: list[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``leaves``, each once, in the order of their first occurrence."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def refill(arguments: Any, left: Any) -> Any:
    """Change the caller's lists, deques, dictionaries and opened objects, in place, to ``left``, the content that the
    forward gave to copies, and return them. Where types or the items of a tuple differ, return that part of ``left``
    instead."""
    if type(arguments) is not type(left):
        return left
    if type(arguments) in OPENED:
        refill(vars(arguments), vars(left))
        return arguments
    if isinstance(arguments, dict):
        parts = {key: refill(arguments[key], one) if key in arguments else one for key, one in left.items()}
        for key in arguments.keys() - parts.keys():
            del arguments[key]
        for key, one in parts.items():  # some classes have no `update`
            arguments[key] = one
        return arguments
    if not isinstance(arguments, (list, tuple, deque)):
        return left
    items = [*map(refill, arguments, left), *[*left][len(arguments) :]]
    if isinstance(arguments, (list, deque)):
        arguments.clear()
        arguments.extend(items)
    elif not all(map(is_, arguments, items)):
        return left
    return arguments


class FlatModel(nn.Module):
    """A model as a function of the tensors among its arguments that returns a flat tuple of tensors. Each call sets the
    attributes from which, with the returned tensors, the nested results are rebuilt. ``forward``: is called as the
    model's forward. ``leaves``, ``spec``: the arguments of the call, flattened."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        leaves: list[Any],
        spec: pytree.TreeSpec,
        state: PythonState,
    ) -> None:
        """Note which leaves of the arguments are tensors, each tensor once. ``state``: the Python state, which each
        call restores."""
        super().__init__()
        self.model, self._forward, self._state = model, forward, state
        self.training = model.training
        first: dict[int, str] = {}  # tied tensor → its first name
        self._names = {name: first.setdefault(id(t), name) for name, t in slots(model).items()}
        at: dict[int, int] = {}
        self._leaves = [
            (at.setdefault(id(leaf), len(at)), None) if isinstance(leaf, torch.Tensor) else (None, leaf)
            for leaf in leaves
        ]
        self._spec = spec
        #: Which of the tensors autocast casts at each use, by their positions.
        self.cast_anew = frozenset(at for at, tensor in enumerate(tensors_in(leaves)) if is_cast_anew(tensor))
        #: The structure of the results, a list of each `Write` with its value, and the arguments if the
        #: forward changed a list or dictionary in them.
        self.outputs: pytree.TreeSpec
        #: Its leaves, with a `ResultTensor`, `ArgumentLeaf` or `ModuleTensor` for each tensor that is known.
        self.constants: list[Any] = []
        self.count = 0  # the number of tensors among the outputs
        #: The positions, as text, of output tensors that occur only in the list of writes.
        self.attributes: frozenset[str] = frozenset()
        #: What the forward changes and a planned call does not: tensors that are not found, and `requires_grad`.
        self.lost: tuple[str, ...] = ()
        #: The names that the last run of the forward changed in the Python state.
        self.found = Changes()
        #: The model's tensors before the last run of its forward.
        self.tensors_of: ModuleTensors

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model with these tensors. Return, each once, the tensors in its results and in the arguments that it
        changed, and new ones in what it set. Views, inputs, parameters and buffers among them are copied; inputs,
        parameters and buffers without gradient become placeholders in `constants` instead. Raises `ModelError` if a
        planned step cannot return the tensors or make the changes."""
        leaves = [leaf if at is None else tensors[at] for at, leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        self.tensors_of = tensors_of = ModuleTensors(self.model)
        given = flattened((args, kwargs))  # objects are leaves here: `_called` finds changes of them
        constant = [(at, leaf) for at, leaf in enumerate(tensors) if not leaf.requires_grad]
        self._state.begin(self.found.numbers)
        results = self._called(args, kwargs)
        renewed = tensors_of.changes()
        changes, self.found = find_changes(self._state)
        changes += renewed
        check_uncounted((results, [value for write, value in changes if write.how != "number"]))
        open_classes((results, [value for _, value in changes]))
        known = self._known(leaves, renewed)
        writes = [(write, _named(write, value, known)) for write, value in changes]
        thawed = [at for at, leaf in constant if leaf.requires_grad and leaf.is_leaf]
        self.lost = (
            *(write.name for write, value in writes if value is LOST),
            *(f"requires_grad of argument {at}" for at in thawed),
        )
        left = self._left((args, kwargs), leaves, given)
        flat, self.outputs = flattened((results, [one for one in writes if one[1] is not LOST], left))
        self._state.undo()  # the results may be among it
        tensors_of.restore()
        returned = {id(o) for o in flattened((results, left))[0]}
        outputs = self._placed(flat, returned, known)
        own = {id(t) for t in (*tensors, *self.model.parameters(), *self.model.buffers())}
        # A view must be copied to have a separate tangent.
        return tuple(o.clone() if o._is_view() or id(o) in own else o for o in outputs)

    def _known(self, leaves: list[Any], renewed: list[tuple[Write, Any]]) -> dict[int, Any]:
        """Return placeholders for the model's and the arguments' tensors, by their ids. ``renewed``: tensors that the
        forward put in the place of others."""
        # A recurrent layer rebuilds its list of weights. The weights in it are no results, but the model's parameters.
        known: dict[int, Any] = {
            id(t): ModuleTensor(self._names[name])
            for name, t in slots(self.model).items()
            if name in self._names and all(t is not new for _, new in renewed)
        }
        return known | {id(t): ArgumentLeaf(at) for at, t in enumerate(leaves) if isinstance(t, torch.Tensor)}

    def _placed(self, flat: list[Any], returned: set[int], known: dict[int, Any]) -> list[torch.Tensor]:
        """Return the tensors among the leaves ``flat`` that the step computes, each once, and set `constants`, `count`
        and `attributes`. ``returned``: ids of leaves that the caller gets; ``known``: placeholders, by ids."""
        # What the caller has already is returned itself; the gradient of one that has one belongs to the step.
        same = {id(o): known[id(o)] for o in flat if id(o) in known and not o.requires_grad}
        new = {
            id(o): o
            for o in flat
            if isinstance(o, torch.Tensor)
            and id(o) not in same
            and (id(o) in returned or not _existed_before(o))
        }
        name = type(self.model).__name__
        if not new:
            check_no_hidden_tensors(flat, f"{name} returns nothing but", True)
        if any(o.retains_grad for o in new.values()):
            raise ModelError(
                f"{name} retains the gradient of a tensor that it returns (retain_grad); a planned step keeps only "
                f"gradients of parameters and inputs"
            )
        places = {of: ResultTensor(at) for at, of in enumerate(new)} | same
        self.constants, self.count = [places.get(id(o), o) for o in flat], len(new)
        self.attributes = frozenset(str(at) for at, of in enumerate(new) if of not in returned)
        return list(new.values())

    def _called(self, args: Any, kwargs: Any) -> Any:
        """Call the model and return its results. Objects that it is called with are restored afterwards; `ModelError`
        if it changed one."""
        objects = SameObjects(pytree.tree_leaves((args, kwargs), is_leaf=_is_object))
        try:
            results = self._forward(*args, **kwargs)
        finally:
            changed = objects.restore()
        if changed:
            raise ModelError(
                f"the forward changes an object that it is called with, a {type(changed[0]).__name__}; return what it "
                f"computes (a cache of keys and values is not needed in training: use_cache=False)"
            )
        return results

    def _left(self, arguments: Any, leaves: list[Any], given: tuple[list[Any], pytree.TreeSpec]) -> Any:
        """Return the arguments after the forward, or None if the forward did not change them. ``given``: the arguments
        before, flattened with closed objects."""
        left, spec = flattened(arguments)
        if spec == given[1] and all(map(is_, left, given[0])):
            return None
        left, spec = flattened(with_opened_objects(arguments))
        at = {id(leaf): ArgumentLeaf(at) for at, leaf in enumerate(leaves)}
        return pytree.tree_unflatten([at.get(id(leaf), leaf) for leaf in left], spec)


def _is_object(one: Any) -> bool:
    """Return whether `refill` cannot change an argument in place, such as one of a class that a user registered with
    PyTorch's pytrees."""
    return not isinstance(one, (list, tuple, deque, dict)) and type(one) not in OPENED


LOST = object()
"""Stands for a value that a planned call cannot store, because it has tensors that are not found."""


def _named(write: Write, value: Any, names: dict[int, Any]) -> Any:
    """Return ``value``, which a planned call stores, with placeholders for known tensors. If the value hides tensors,
    return `LOST`, or raise `ModelError` if the forward reads it (`Write.read`)."""
    leaves, spec = flattened(value)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, nn.Module)) and _hides_tensors(leaf):
            if write.read:
                raise ModelError(
                    f"the forward leaves a {type(leaf).__name__} with tensors in {write.name} and reads it in the "
                    f"next call; make the tensors buffers (register_buffer)"
                )
            return LOST
    return pytree.tree_unflatten([names.get(id(leaf), leaf) for leaf in leaves], spec)


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, weakref.ref):
        return isinstance(leaf(), torch.Tensor)
    return hides_tensors(leaf, called_later=True) or any(
        isinstance(item, torch.Tensor)
        for one in containers_in(leaf)
        for item in (one.values() if isinstance(one, dict) else one)
    )


def _existed_before(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not one of a trace, so that it has existed before."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not is_functional_tensor(tensor)
