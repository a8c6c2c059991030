"""What a plan cannot take or give: tensors without strides, tensors that PyTorch does not see, hooks that do more than
compute."""

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
"""Where hooks come from that do nothing but compute: reparametrizations, outputs of inner layers."""


def check_dense(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Refuse tensors without strides.

    Raises:
        ModelError: the message begins with ``what``.
    """
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
            raise ModelError(f"{what} a {kind}; plans are for dense ones")


def check_no_hidden_tensors(leaves: Sequence[Any], what: str, called_later: bool = False) -> None:
    """Refuse objects with tensors that PyTorch does not look into; see `hides_tensors`.

    Raises:
        ModelError: the message begins with ``what``.
    """
    for one in leaves:
        if hides_tensors(one, called_later):
            raise ModelError(
                f"{what} a {type(one).__name__}, whose tensors PyTorch does not see; give them in a tuple or "
                f"dictionary, or register the class with torch.utils._pytree"
            )


def hides_tensors(one: Any, called_later: bool = False) -> bool:
    """Whether something leads to a tensor by its attributes, through containers and other objects, or is an iterator,
    which computes when it is asked. ``called_later``: or whether a function does by what it has of those around it."""
    if isinstance(one, Iterator):
        return True
    seen: set[int] = set()
    todo = _behind(one) if called_later else [getattr(one, "__dict__", None)]
    while todo:
        held = todo.pop()
        if isinstance(held, torch.Tensor):
            return True
        if id(held) in seen or isinstance(held, (type, ModuleType, FunctionType, nn.Module)):
            continue
        seen.add(id(held))
        leaves = pytree.tree_leaves(held)
        todo += leaves if leaves != [held] else [getattr(held, "__dict__", None)]
    return False


def _behind(one: Any) -> list[Any]:
    """An object's attributes, or what a function has of those around it and a method of its object."""
    held = [getattr(one, "__self__", None), getattr(one, "__dict__", None)]
    for cell in getattr(one, "__closure__", None) or ():
        with suppress(ValueError):  # nothing is in it yet
            held.append(cell.cell_contents)
    return held


class NotGiven(ModelError, AttributeError):
    """What is asked of an output that a planned step does not give; such an output has no attributes."""


class Withheld:
    """Stands in the place of an output that hides tensors: whoever uses it is told."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling look for
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotGiven(
            f"{self._what}, whose tensors PyTorch does not see, and a planned step does not give; register the class "
            f"with torch.utils._pytree, or call the model without gradients"
        )

    __call__ = __iter__ = _refuse


def hooked(module: nn.Module) -> list[str]:
    """The names of the parts of a module that have hooks, other than those that only compute."""
    return [
        name
        for name, m in module.named_modules()
        if m is not module
        and any(not _only_computes(hook) for kind in HOOKS for hook in m.__dict__[kind].values())
    ]


def _only_computes(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(COMPUTING)
