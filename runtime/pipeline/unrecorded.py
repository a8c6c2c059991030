"""Refuse models with what `torch.export` does not record: a backward of their own, buffers that the forward assigns,
numbers with which it computes and that it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import fx, nn

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


Numbers: TypeAlias = dict[tuple[nn.Module, str], Any]
"""New values of attributes that are numbers, by module and name."""


@contextmanager
def watched_attributes(model: nn.Module) -> Iterator[Numbers]:
    """Record what this thread assigns, in the block, to attributes of modules that were numbers before. Afterwards
    restore these numbers, and drop equal ones from the record. `ModelError` after the block if another tensor was
    assigned to a buffer."""
    thread, numbers, buffers, old = get_ident(), Numbers(), list[str](), Numbers()
    assign: Callable[..., None] = nn.Module.__setattr__

    def assigned(module: nn.Module, name: str, value: Any) -> None:
        """Assign an attribute. In this thread, first note it: in ``buffers`` for another tensor of a buffer, in
        ``numbers`` and ``old`` for one that was a number."""
        if get_ident() == thread:
            # Not getattr: the tracer has modules without attributes of their own.
            before = module.__dict__.get(name)
            known = module.__dict__.get("_buffers", {})
            if name in known and known[name] is not value:  # += assigns the same tensor
                buffers.append(name)
            elif isinstance(before, (int, float)):
                old.setdefault((module, name), before)
                numbers[module, name] = value
        assign(module, name, value)

    try:
        with patch.object(nn.Module, "__setattr__", assigned):
            yield numbers
    finally:
        for (module, name), value in old.items():
            setattr(module, name, value)
            if numbers[module, name] == value:
                del numbers[module, name]
    if buffers:
        raise ModelError(
            f"{type(model).__name__} cannot be cut into stages: its forward assigns the buffer {buffers[0]}, and "
            f"stages would not; change it in place, as by self.{buffers[0]}.copy_(...)"
        )


def check_numbers(model: nn.Module, numbers: Numbers, graph: fx.Graph, again: Callable[[], fx.Graph]) -> None:
    """Raise `ModelError` if the forward of ``model``, exported by ``again`` with its attributes changed to ``numbers``,
    has another graph than ``graph``. The attributes are restored."""
    if not numbers:
        return
    old = {(module, name): getattr(module, name) for module, name in numbers}
    try:
        for (module, name), value in numbers.items():
            setattr(module, name, value)
        other = again()
    finally:
        for (module, name), value in old.items():
            setattr(module, name, value)
    if str(other) != str(graph):
        names = ", ".join(sorted({name for _, name in numbers}))
        raise ModelError(
            f"{type(model).__name__} cannot be cut into stages: its forward computes with {names}, which it changes; "
            f"make it a buffer, and change it in place"
        )
