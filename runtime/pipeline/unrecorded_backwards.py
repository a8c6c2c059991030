"""Refuse models that define a part of their backward by an autograd function or by hooks, which `torch.export` does
not record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rematplan.ir import ModelError

META: Any = type(torch.autograd.Function)
"""The class of autograd functions. Each ``apply`` reads the attribute ``_backward_cls`` of its function."""


@contextmanager
def refuse_unrecorded_backwards(model: nn.Module) -> Iterator[None]:
    """Raise `ModelError` for a model with module hooks for backwards. After the block, which exports the model, also
    raise it if this thread called an autograd function or registered a tensor's hook."""
    name = type(model).__name__
    for part, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ModelError(
                f"{name} cannot be cut into stages: {part or 'it'} has a backward hook, which stages would not run"
            )
    thread, found = get_ident(), list[str]()
    register: Callable[..., Any] = torch.Tensor.register_hook

    def read(cls: type, attribute: str) -> Any:
        if attribute == "_backward_cls" and get_ident() == thread:
            found.append(f"the autograd function {cls.__name__}, whose backward stages would not run")
        return type.__getattribute__(cls, attribute)

    def registered(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if get_ident() == thread:
            found.append("Tensor.register_hook, and stages would not run that hook")
        return register(tensor, hook)

    with (
        patch.object(META, "__getattribute__", read, create=True),
        patch.object(torch.Tensor, "register_hook", registered),
    ):
        yield
    if found:
        raise ModelError(f"{name} cannot be cut into stages: its forward calls {found[0]}")
