"""Refuse models whose forward assigns buffers, or computes with numbers that it changes, which `torch.export` does
not record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeAlias
from unittest.mock import patch

from torch import fx, nn

from rematplan.ir import ModelError

Numbers: TypeAlias = dict[tuple[nn.Module, str], Any]
"""New values of attributes that are numbers, by module and name."""


@contextmanager
def watched_attributes(model: nn.Module) -> Iterator[Numbers]:
    """Record the new values of attributes of modules, if numbers, that this thread assigns in the block. Afterwards
    restore the old values, and drop new ones that are equal. Raises `ModelError` after the block if it assigned another
    tensor to a module's buffer."""
    thread, numbers, buffers, old = get_ident(), Numbers(), list[str](), Numbers()
    assign: Callable[..., None] = nn.Module.__setattr__

    def assigned(module: nn.Module, name: str, value: Any) -> None:
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
