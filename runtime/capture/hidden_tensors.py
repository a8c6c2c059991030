"""Checks for what a plan cannot take or return: tensors without strides, tensors that PyTorch does not see,
and hooks with side effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.guards.module_state import HOOKS

COMPUTING = ("torch.nn.utils.", "transformers.utils.output_capturing")
"""Modules whose hooks only compute: reparametrisations, outputs of inner layers."""


def check_dense(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Refuse nested and sparse tensors.

    Args:
        tensors: the tensors.
        what: the beginning of the error's message.

    Raises:
        ModelError: a tensor is nested or has another layout than ``torch.strided``.
    """
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
            raise ModelError(f"{what} a {kind}; plans are for dense ones")


def check_no_hidden_tensors(leaves: Sequence[Any], what: str, called_later: bool = False) -> None:
    """Refuse objects that contain tensors which PyTorch's pytrees do not find, such as instances of unregistered
    classes.

    Args:
        leaves: the objects.
        what: the beginning of the error's message.
        called_later: whether to look into closures and bound objects, as in `hides_tensors`.

    Raises:
        ModelError: `hides_tensors` is true for one of the objects.
    """
    for one in leaves:
        if hides_tensors(one, called_later):
            raise ModelError(
                f"{what} a {type(one).__name__}, whose tensors PyTorch does not see; pass them in a tuple or "
                f"dictionary, or register the class with torch.utils._pytree"
            )


def hides_tensors(one: Any, called_later: bool = False) -> bool:
    """Return whether an object leads to a tensor through its attributes, containers and other objects, or is an
    iterator, which computes on demand. Functions, classes and modules that the object refers to are not followed.

    Args:
        one: the object.
        called_later: if ``one`` is a function, also follow its closure; if it is a bound method, also its object.
    """
    if isinstance(one, Iterator):
        return True
    seen: set[int] = set()
    todo = _behind(one) if called_later else [getattr(one, "__dict__", None)]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            return True
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType, nn.Module)):
            continue
        seen.add(id(value))
        leaves = pytree.tree_leaves(value)
        todo += leaves if leaves != [value] else [getattr(value, "__dict__", None)]
    return False


def _behind(one: Any) -> list[Any]:
    """Return an object's attributes, the closure of a function, and the object of a bound method."""
    values = [getattr(one, "__self__", None), getattr(one, "__dict__", None)]
    for cell in getattr(one, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    return values


class NotGiven(ModelError, AttributeError):
    """An attempt to use an output that a planned step does not return, since the output hides tensors. Also an
    AttributeError, so that ``hasattr`` is false for such an output."""


class Withheld:
    """A placeholder for an output that a planned step does not return, since it hides tensors. Calling or iterating
    over it, and reading an attribute, raise `NotGiven`.

    ``what``: the beginning of the error's message.
    """

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look for such names
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotGiven(
            f"{self._what}, whose tensors PyTorch does not see, so a planned step does not return it; register the "
            f"class with torch.utils._pytree, or call the model without gradients"
        )

    __call__ = __iter__ = _refuse


def hooked(module: nn.Module) -> list[str]:
    """Return the names of a module's submodules that have hooks, other than hooks which are known only to compute
    (reparametrisations, outputs of inner layers). Hooks of the module itself do not count."""
    return [
        name
        for name, m in module.named_modules()
        if m is not module
        and any(not _only_computes(hook) for kind in HOOKS for hook in m.__dict__[kind].values())
    ]


def _only_computes(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(COMPUTING)
