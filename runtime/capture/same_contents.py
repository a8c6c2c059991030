"""`SameContents`: undo what a run of a model has written into tensors that existed before it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rematplan.runtime.capture.restore_state import same_attributes, same_buffers, same_draws, same_gradients
from rematplan.runtime.graph.compat import OpOverload, TorchDispatchMode
from rematplan.runtime.graph.tensor_storages import storages_in


@contextmanager
def unchanged(model: nn.Module, *, copied: bool = False) -> Iterator[None]:
    """A context for a run of a model, without warnings, after which all its state and all random states are as before.
    It begins without gradients or, if ``copied``, with copies."""
    with (
        warnings.catch_warnings(),
        same_buffers(model),
        same_gradients(model, copied),
        same_draws(),
        same_attributes(model, ""),
        SameContents(model),
    ):
        warnings.simplefilter("ignore")
        yield


class SameContents(TorchDispatchMode):
    """Restores, after a ``with`` statement, the content of tensors that existed before it and that ops have written. It
    also restores the storages of a model's parameters and buffers (``p.data = …``). A tensor is copied when an op is
    about to write into it, so a model that writes nothing costs no memory."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._named = [(one, one.detach()) for one in (*model.parameters(), *model.buffers())]
        self._made: set[int] = set()
        """The storages that the block has made and that still exist."""
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """By storage that was written, the storage and a copy of it from before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op after copying the storages that it is about to write, except those copied before or created inside
        the statement. Note the storages that it creates."""
        del types
        kwargs = kwargs or {}
        for key, storage in storages_in(_written(func, args, kwargs)).items():
            if key not in self._made and key not in self._before:
                self._before[key] = storage, storage.clone()
        result = func(*args, **kwargs)
        given = storages_in((args, kwargs))
        for key, storage in storages_in(result).items():
            if key not in given and key not in self._made:
                self._made.add(key)
                weakref.finalize(storage, self._made.discard, key).atexit = False
        return result

    def __exit__(self, *raised: Any) -> None:
        """Restore the tensors."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for storage, was in self._before.values():
            if storage.nbytes() == was.nbytes():
                storage.copy_(was)
        for tensor, was_view in self._named:
            if _moved(tensor, was_view):
                tensor.data = was_view


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an op writes, as its schema says. An op of higher order, such as `torch.cond`, has no
    schema, and may write all of them."""
    if not isinstance(func, OpOverload):
        return [args, kwargs]
    return [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _moved(tensor: torch.Tensor, was: torch.Tensor) -> bool:
    """Return whether a tensor has another storage, type or form than before."""
    if tensor.dtype != was.dtype or tensor.shape != was.shape or tensor.stride() != was.stride():
        return True
    return storages_in(tensor).keys() != storages_in(was).keys()
