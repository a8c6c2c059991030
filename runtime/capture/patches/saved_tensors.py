"""Refuse hooks on saved tensors: a planned step saves others, so hooks would not change its gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from traceback import walk_stack
from typing import Any, TypeAlias
from unittest.mock import patch

from rematplan.ir import ModelError
from rematplan.runtime.graph.code_line import code_line
from rematplan.runtime.graph.compat import PUSH_SAVED_TENSORS_HOOKS, c_autograd, top_saved_tensors_hooks
from rematplan.runtime.graph.warn import warn

Hook: TypeAlias = Callable[..., Any]
"""A hook that packs or unpacks a saved tensor."""
OF_CHECKPOINTS = "torch.utils.checkpoint."
"""The beginning of the names of the hooks with which a checkpoint runs a function again: they store nothing."""
ON_CPU = "torch.autograd.graph.save_on_cpu."
"""The beginning of the names of the hooks that store the same bits on another device."""


@contextmanager
def no_saved_tensors_hooks(name: str) -> Iterator[None]:
    """Raise `ModelError`, inside the block and in this thread, for hooks on saved tensors, except a checkpoint's. Warn
    after the block of `save_on_cpu`, which does not change gradients. ``name``: of the model."""
    ignored = False

    def checked(pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        nonlocal ignored
        line = code_line(walk_stack(sys._getframe(1)))
        ignored |= _is_ignored(pack, f"{name}: its forward uses", f" at {line}" if line else "")
        return pack, unpack

    with hooks_replaced(checked):
        yield
    if ignored:
        _warn_of_ignored(f"the forward of {name} uses")


@contextmanager
def hooks_replaced(instead: Callable[[Hook, Hook], tuple[Hook, Hook]]) -> Iterator[None]:
    """Inside the block and in this thread, let PyTorch use what ``instead`` returns for a pair of hooks on saved
    tensors."""
    thread, push = get_ident(), getattr(c_autograd, PUSH_SAVED_TENSORS_HOOKS)

    def pushed(pack: Hook, unpack: Hook) -> None:
        push(*(instead(pack, unpack) if get_ident() == thread else (pack, unpack)))

    with patch.object(c_autograd, PUSH_SAVED_TENSORS_HOOKS, pushed):
        yield


def check_saved_tensors_hooks(name: str) -> None:
    """Raise `ModelError` if a planned module is called inside hooks on saved tensors, except a checkpoint's; warn of
    `save_on_cpu`."""
    hooks = top_saved_tensors_hooks(False)
    if hooks and _is_ignored(hooks[0], f"{name} is called inside"):
        _warn_of_ignored(f"{name} is called inside")


def _is_ignored(pack: Callable[..., Any], what: str, where: str = "") -> bool:
    """Return whether hooks are those of ``save_on_cpu``, which a planned step ignores. Raises `ModelError` for hooks
    other than these and a checkpoint's. ``pack``: the first hook; ``what``, ``where``: parts of the message."""
    hook = pack if hasattr(pack, "__qualname__") else type(pack)
    name = f"{hook.__module__}.{hook.__qualname__}"
    if not name.startswith((OF_CHECKPOINTS, ON_CPU)):
        raise ModelError(
            f"{what} torch.autograd.graph.saved_tensors_hooks{where} ({name}), which a planned step would ignore, "
            f"since it saves other tensors than eager mode: leave the hooks out, because the plan keeps to the memory "
            f"budget, or plan the submodules that run outside of them"
        )
    return name.startswith(ON_CPU)


def _warn_of_ignored(what: str) -> None:
    warn(
        f"{what} torch.autograd.graph.save_on_cpu, which a planned step ignores: the plan decides what is kept, and "
        f"keeps it on the device"
    )
