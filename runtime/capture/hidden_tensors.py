"""Checks for what a planned step cannot have: sparse, nested or hidden tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import pytree


def check_dense(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Raise `ModelError` for a nested or sparse tensor. ``what``: the beginning of the message."""
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
            raise ModelError(f"{what} a {kind}; plans are for dense ones")


def check_no_hidden_tensors(leaves: Sequence[Any], what: str, called_later: bool = False) -> None:
    """Raise `ModelError` for an object with tensors that PyTorch's pytrees do not find, as in unregistered classes.
    ``what``: the beginning of the message. ``called_later``: whether an object's closure or bound instance is searched,
    too."""
    for one in leaves:
        if hides_tensors(one, called_later):
            raise ModelError(
                f"{what} a {type(one).__name__}, whose tensors PyTorch does not see; pass them in a tuple or "
                f"dictionary, or register the class with torch.utils._pytree"
            )


def hides_tensors(one: Any, called_later: bool = False) -> bool:
    """Return whether a tensor is in ``one``'s ``__dict__`` or items, or below, outside functions, classes and modules;
    true if ``one`` is an iterator. ``called_later``: search also its closure or bound instance."""
    if isinstance(one, Iterator):
        return True
    seen: set[int] = set()
    todo = _behind(one) if called_later else _within(one)
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            return True
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType, nn.Module)):
            continue
        seen.add(id(value))
        leaves = pytree.tree_leaves(value)
        todo += _within(value) if len(leaves) == 1 and leaves[0] is value else leaves
    return False


def _within(one: Any) -> list[Any]:
    """Return an object's ``__dict__``, and the items of a list or tuple or the values of a dictionary, subclasses
    included."""
    items = [*dict.values(one)] if isinstance(one, dict) else [*one] if isinstance(one, (list, tuple)) else []
    return [_attribute(one, "__dict__"), *items]


def _attribute(one: Any, name: str) -> Any:
    with suppress(Exception):  # a user's `__getattr__` may raise anything
        return getattr(one, name, None)
    return None


def _behind(one: Any) -> list[Any]:
    """Return where to search ``one`` for tensors: its ``__dict__``, a function's closure, a method's instance."""
    values = [_attribute(one, "__self__"), *_within(one)]
    for cell in _attribute(one, "__closure__") or ():
        with suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    return values


class NotGiven(ModelError, AttributeError):
    """Raised when a caller uses an output with tensors that pytrees do not find. As an AttributeError, it makes
    ``hasattr`` false."""


class Withheld:
    """A placeholder for an output with tensors that pytrees do not find. Calling it, iterating, and reading its items
    or attributes (except special names) raise `NotGiven`. ``what``: the beginning of the message."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look for such names
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotGiven(
            f"{self._what}, whose tensors PyTorch does not see, so a planned step does not return it; return "
            f"the tensors themselves, register the class with torch.utils._pytree, or call the model without gradients"
        )

    __call__ = __iter__ = __getitem__ = _refuse
